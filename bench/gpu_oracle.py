"""NCCL ranks on one GPU against one process: outputs, loss, gradients, clip norm and steps of a fused optimizer, float32 and bf16.

    PYTHONPATH=src:. python bench/gpu_oracle.py [--ranks 8] [--limit 240] [--schedulers auto,direct]

NCCL refuses two ranks on one GPU unless they look like different hosts, so each gets its own NCCL_HOSTID; it is a test of
every code path, not of speed. Outside the one wait for the counts the host never waits for the device: the steps run under
torch.cuda.set_sync_debug_mode("error"). Then a fused AdamW steps both, and the losses of the next steps are compared, every replica
with its home before its use. Ways: experts at home, replicas, tokens that cross to a node once, and a codec that loses nothing. Prints a table; exit status 1 if a line fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from bench.gpu_ranks import on_ranks, open_world

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 64, 128, 20, 4, 96
STEPS, RATE = 4, 3e-3  # of the optimizer
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
QUOTA = {"planner": "quota", "slots": 1, "policy": "quota"}
WAYS = {
    "static": {},
    "quota": QUOTA,
    "once": {"dedup": True},
    "quota, once": QUOTA | {"dedup": True},
    "lossless": QUOTA | {"codec": "lossless@all"},
}
EVERYWHERE = ("static", "quota")  # the others with the first scheduler alone


def shares(ranks, seed):
    """Unequal tokens per rank, none on rank 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(0 if rank == 1 else TOKENS + 7 * rank, HIDDEN, generator=generator, dtype=torch.float64)
        for rank in range(ranks)
    ]


def weights(seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "gate_up": (EXPERTS, 2 * INNER, HIDDEN),
        "down": (EXPERTS, HIDDEN, INNER),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def one_process(x, given, index):
    """Plain loop over all experts in the dtype of `x`; the choices are given, so that rounding cannot change them."""
    import torch
    from torch.nn import functional

    router, gate_up, down = (given[name].detach().requires_grad_() for name in ("router", "gate_up", "down"))
    probabilities = torch.softmax(functional.linear(x.float(), router.float()), -1)
    picked = probabilities.gather(1, index)
    picked = picked / picked.sum(-1, keepdim=True)
    y = torch.zeros_like(x, dtype=torch.float32)
    for e in range(EXPERTS):
        token, choice = torch.nonzero(index == e, as_tuple=True)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, -1)
        out = (functional.silu(gate) * up) @ down[e].T
        y = y.index_add(0, token, out * picked[token, choice].unsqueeze(-1))
    loss = (y.to(x.dtype).float() ** 2).sum() / len(x)
    grads = torch.autograd.grad(loss, (router, gate_up, down))
    return y, loss.detach(), dict(zip(("router", "gate_up", "down"), grads, strict=True))


def cases(schedulers):
    """(scheduler, way) of each line."""
    return [(one, way) for one in schedulers for way in WAYS if way in EVERYWHERE or one == schedulers[0]]


def run(rank, options, folder, out):
    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    import torch
    import torch.distributed as dist

    import moeyard as my
    import moeyard.runtime as yr
    from moeyard.runtime.transport import transfers

    transfers.SMALL = 1024  # rows are small here; messages go as in a large model, each transfer apart
    open_world(rank, options.ranks, folder)
    schedulers = options.schedulers.split(",")
    cluster = my.Cluster(2, options.ranks // 2, my.Port(400e9, 3e-6), my.Port(48e9, 8e-6))
    rows = []
    with yr.Yard(cluster=cluster, timeout=options.limit) as yard:
        for dtype in (torch.float32, torch.bfloat16):
            for scheduler, way in cases(schedulers):
                usual = {"planner": "static", "slots": 1, "policy": "auto", "dedup": False, "codec": None}
                yard.choose(scheduler=scheduler, **(usual | WAYS[way]))
                rows.append(case(yard, dtype, scheduler, way, rank, options.ranks))
                if rank == 0:
                    print(rows[-1], file=out, flush=True)
    dist.destroy_process_group()


def case(yard, dtype, scheduler, way, rank, ranks):
    """One line of the table: largest relative error of each quantity over the ranks."""
    import torch
    import torch.distributed as dist

    import moeyard.runtime as yr

    device = torch.device("cuda", 0)
    given = {name: value.to(device, dtype) for name, value in weights(1).items()}
    parts = [part.to(device, dtype) for part in shares(ranks, 2)]
    whole = torch.cat(parts)
    logits = torch.nn.functional.linear(whole.float(), given["router"].float())
    logits[:, 0] += 2.0  # a hot expert, so that replicas pay
    index = torch.topk(logits, TOP_K).indices
    y, loss, grads = one_process(whole, given, index)

    start = sum(len(part) for part in parts[:rank])
    mine, chosen = parts[rank], index[start : start + len(parts[rank])]

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(given["router"].clone())

        def forward(self, x):
            scores = torch.nn.functional.linear(x.float(), self.weight.float())
            probabilities = torch.softmax(scores, -1)
            picked = probabilities.gather(1, chosen)
            return yr.RouterState(probabilities, chosen, picked / picked.sum(-1, keepdim=True))

    layer = yr.MoELayer(HIDDEN, INNER, EXPERTS, TOP_K, yard, router=Fixed(), dtype=dtype)
    layer.load_logical(given["gate_up"], given["down"])
    layer(mine)  # first use allocates
    torch.cuda.synchronize()
    # With a codec the host waits at each gather for what the ranks tell one another.
    torch.cuda.set_sync_debug_mode("default" if "codec" in WAYS[way] else "error")
    try:
        result = layer(mine)
        share = (result.float() ** 2).sum() / len(whole)
        share.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yr.sync_gradients(layer, yard)
    norm = yr.clip_grad_norm_(layer, 1e9, yard)
    total = share.detach().clone()
    dist.all_reduce(total)
    expected_norm = torch.sqrt(sum((grad.double() ** 2).sum() for grad in grads.values()))
    errors = [
        relative(result.float(), y[start : start + len(mine)]),
        abs(float(total - loss)) / float(loss),
        relative(layer.router.weight.grad, grads["router"]),
        relative(layer.gate_up.grad, grads["gate_up"][layer.own]),
        relative(layer.down.grad, grads["down"][layer.own]),
        abs(float(norm - expected_norm)) / float(expected_norm),
    ]
    stepped, copies = steps(yard, layer, mine, (whole, given, index))  # takes the gradients with it
    errors.append(stepped)
    worst = torch.tensor(errors, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    name = str(dtype).removeprefix("torch.")
    grouped = yr.grouped_matmul_fits(mine.new_empty(1, HIDDEN), (EXPERTS, HIDDEN, INNER))
    # torch's grouped matmul for float32 waits for the device; the layer's own loop does not.
    fine = bool((worst <= TOLERANCE[name]).all()) and (grouped or dtype == torch.float32)
    fine = fine and (copies > 0) == ("planner" in WAYS[way])
    figures = "  ".join(f"{value:8.1e}" for value in worst.tolist())
    return f"{name:9} {scheduler:7} {way:11} {figures}  {'grouped' if grouped else 'loop':8}{copies:6} {'ok' if fine else 'FAIL'}"


def steps(yard, layer, mine, everything):
    """(largest relative difference of a loss from the one process', copies found equal to their homes) over optimizer steps."""
    import torch
    import torch.distributed as dist

    import moeyard.runtime as yr

    whole, given, index = everything
    plain = {name: torch.nn.Parameter(value.clone()) for name, value in given.items()}
    optimizers = [
        torch.optim.AdamW(some, lr=RATE, fused=True) for some in (plain.values(), layer.parameters())
    ]
    worst, copies = 0.0, 0
    for _ in range(STEPS):
        _, loss, grads = one_process(whole, plain, index)
        for name, parameter in plain.items():
            parameter.grad = grads[name]
        layer.zero_grad()
        share = (layer(mine).float() ** 2).sum() / len(whole)
        copies += yard.check_replicas()
        share.backward()
        yr.sync_gradients(layer, yard)
        total = share.detach().clone()
        dist.all_reduce(total)
        worst = max(worst, abs(float(total - loss)) / float(loss))
        for optimizer in optimizers:
            optimizer.step()
    return worst, copies


def relative(a, b):
    if b.numel() == 0:
        return 0.0
    a, b = a.detach(), b.detach()
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-6))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--schedulers", default="auto,direct,rails,fast,shunt,ecmp")
    options = parser.parse_args()
    ended = on_ranks(__file__, options, ("ranks", "limit", "schedulers"), run)
    if ended is None:
        return 0
    import torch

    codes, lines = ended
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {options.ranks} NCCL ranks as 2 nodes",
        "dtype     scheduler way          output    loss      router    gate_up   down      norm      steps     experts  copies",
        *lines,
        sep="\n",
    )
    wanted, good = 2 * len(cases(options.schedulers.split(","))), sum(line.endswith(" ok") for line in lines)
    print(f"{good} of {wanted} lines hold; ranks left with {codes}")
    return int(good < wanted or any(codes))


if __name__ == "__main__":
    sys.exit(main())
