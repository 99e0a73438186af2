"""The expert block on one GPU: share of the matmul ceiling, peak memory, host time, beside Hugging Face's grouped_mm block.

    python -m bench.gpu_block [--json] [--shapes olmoe,mixtral] [--rounds 12] [--no-hf]

Forward and backward in bf16 of the experts with everything around them: sort, gather, six grouped matmuls, activation, weighted
sum, all gradients. A share is the matmuls' floating-point operations over the median time, divided by the best that an 8192-cubed
matmul reached in the same process, cool before the rounds or in turn with the blocks (hot GPUs clock down: a share of the matmul
that takes turns would be higher). Each shape runs in a process of its own. Choices are balanced (each expert equally likely) or
Zipf (likelihood 1 / rank), always distinct. Peak memory is all that is allocated, weights and inputs included, gradients unset before; "beyond" leaves the weights and their
gradients out; "least" is what any block holds that saves the gate/up product and makes whole gradients. Host time is until the last
launch, while the device is kept busy; that of a layer is read several times. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

SHAPES = {  # tokens, hidden, inner, experts, top-k
    "olmoe": (32768, 2048, 1024, 64, 8),
    "qwen3-30b": (32768, 2048, 768, 128, 8),
    "mixtral": (16384, 4096, 14336, 8, 2),
    "dsv3-local": (8192, 7168, 2048, 32, 8),
    "small-64": (1024, 2048, 1024, 128, 8),  # 64 rows an expert
}
GOALS = {"olmoe": 0.62, "qwen3-30b": 0.56, "mixtral": 0.75, "dsv3-local": 0.72}
TINY = (64, 256, 128, 8, 2)
CEILING = 8192
READINGS = 7  # of a layer's host time


def stacks_of(shape):
    """Bytes of the weights and of their gradients."""
    _, hidden, inner, experts, _ = shape
    return 2 * 2 * 3 * experts * hidden * inner


def least(shape, given):
    """Bytes at the highest of what any block must hold that saves the gate/up product and makes whole gradients, beside what it is given:
    allocated for that, in the better of two orders. The gradient of `down` first: that of `gate_up` is made from the product's, beside
    both. Or last: from the inner rows, which lie beside the product until then. No row is gathered."""
    import torch

    tokens, hidden, inner, _, top_k = shape
    found = []

    def new(*size):
        return torch.empty(size, device="cuda", dtype=torch.bfloat16)

    for down_first in (True, False):
        torch.cuda.reset_peak_memory_stats()
        held = [
            new(tokens, hidden),
            new(tokens, hidden),
            new(tokens, top_k),
        ]  # result, gradients of tokens and weights
        product, rows = new(tokens * top_k, 2 * inner), new(tokens * top_k, inner)
        if down_first:
            held.append(torch.empty_like(given.down))
            del rows
            held.append(torch.empty_like(given.gate_up))
            del product
        else:
            held.append(torch.empty_like(given.gate_up))
            del product
            held.append(torch.empty_like(given.down))
            del rows
        found.append(torch.cuda.max_memory_allocated())
        del held
    return min(found)


def layer(shape, zipf, seed=0):
    """Leaves and choices of one layer on the device."""
    import torch

    tokens, hidden, inner, experts, top_k = shape
    torch.manual_seed(seed)

    def draw(*size, scale=1.0):
        return (torch.randn(size, device="cuda", dtype=torch.float32) * scale).to(torch.bfloat16)

    likely = (
        torch.arange(1, experts + 1, device="cuda").float().log().neg()
        if zipf
        else torch.zeros(experts).cuda()
    )
    noise = (
        -torch.empty(tokens, experts, device="cuda").exponential_().log()
    )  # Gumbel: top-k is a draw without return
    index = (likely[torch.randperm(experts, device="cuda")] + noise).topk(top_k).indices
    given = SimpleNamespace(
        x=draw(tokens, hidden).requires_grad_(),
        weights=torch.rand(tokens, top_k, device="cuda").softmax(-1).to(torch.bfloat16).requires_grad_(),
        gate_up=torch.stack(
            [draw(2 * inner, hidden, scale=hidden**-0.5) for _ in range(experts)]
        ).requires_grad_(),
        down=torch.stack([draw(hidden, inner, scale=inner**-0.5) for _ in range(experts)]).requires_grad_(),
    )
    return given, index, draw(tokens, hidden)


def ours(given, index):
    from moeyard.runtime.block import expert_block

    return expert_block(given.x, index, given.weights, given.gate_up, given.down)


def theirs(given, index):
    from torch.nn import functional
    from transformers.integrations.moe import grouped_mm_experts_forward

    def apply_gate(product):
        gate, up = product.chunk(2, dim=-1)
        return functional.silu(gate) * up

    module = SimpleNamespace(
        num_experts=len(given.down),
        gate_up_proj=given.gate_up,
        down_proj=given.down,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        _apply_gate=apply_gate,
    )
    return grouped_mm_experts_forward(module, given.x, index, given.weights)


def unset(given):
    """Gradients."""
    for leaf in vars(given).values():
        leaf.grad = None


def step(block, given, index, d_y):
    unset(given)
    block(given, index).backward(d_y)


def peak(block, *layer):
    """Bytes at the highest, after a first run."""
    import torch

    for _ in range(2):
        step(block, *layer)
        unset(layer[0])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step(block, *layer)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def alternate(calls, rounds):
    """name -> seconds of each call in each round, taking turns."""
    import torch

    times = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(stop) / 1e3)
    return times


def measure(name, rounds, hf):
    """One row for balanced choices, one for Zipf."""
    import torch

    shape = SHAPES[name]
    tokens, hidden, inner, _, top_k = shape
    work = 18 * tokens * top_k * hidden * inner  # six matmuls, each 2 * m * n * k, gate/up ones twice as wide
    stacks = stacks_of(shape)
    square = [torch.randn(CEILING, CEILING, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    cool = alternate({"ceiling": partial(torch.mm, *square)}, 10)["ceiling"]
    del square
    for zipf in (False, True):
        made = layer(shape, zipf)
        blocks = {"": ours} | ({"hf_": theirs} if hf else {})
        peaks = {who: peak(block, *made) for who, block in blocks.items()}
        unset(made[0])
        peaks["least_"] = least(shape, made[0])
        square = [torch.randn(CEILING, CEILING, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        calls = {"ceiling": partial(torch.mm, *square)}
        calls |= {who: partial(step, block, *made) for who, block in blocks.items()}
        found = alternate(calls, rounds)
        ceiling = 2 * CEILING**3 / min(cool + found["ceiling"])
        row = {"shape": name, "choices": "zipf" if zipf else "balanced", "ceiling": ceiling / 1e12}
        row["ceiling_median"] = 2 * CEILING**3 / statistics.median(found["ceiling"]) / 1e12
        for who in blocks:
            took = statistics.median(found[who])
            row |= {f"{who}share": work / took / ceiling, f"{who}ms": took * 1e3}
            row |= {f"{who}peak": peaks[who] / 1e9, f"{who}beyond": (peaks[who] - stacks) / 1e9}
        yield row | {"least": peaks["least_"] / 1e9}
        del made, square, calls
        torch.cuda.empty_cache()


def host(hf, times=30, depth=8):
    """Host milliseconds of a tiny layer, router included, forward + backward: alone, and each of `depth` in a row.

    Medians, and the best: what else runs on the host only adds. No call may wait for the device. A backward pass wakes a
    thread of torch's once: alone a layer pays for it, in a model it shares.
    """
    import torch

    _, hidden, _, experts, top_k = TINY
    layers = [layer(TINY, False, seed)[0] for seed in range(depth)]
    d_y = layer(TINY, False)[2]
    for given in layers:
        given.router = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def whole(block, depth):
        y = layers[0].x
        for given in layers[:depth]:
            logits = torch.nn.functional.linear(y.float(), given.router.float())
            weights, index = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
            y = block(SimpleNamespace(x=y, weights=weights, gate_up=given.gate_up, down=given.down), index)
        y.backward(d_y)
        for given in layers[:depth]:
            unset(given)

    row = {"shape": "tiny"}
    for who, block in {"": ours, **({"hf_": theirs} if hf else {})}.items():
        for name, deep in ((f"{who}alone_ms", 1), (f"{who}host_ms", depth)):
            found = []
            for turn in range(times + 5):
                torch.cuda.synchronize()
                torch.cuda._sleep(100_000_000)
                torch.cuda.set_sync_debug_mode("error")
                start = time.perf_counter()
                whole(block, deep)
                took = time.perf_counter() - start
                torch.cuda.set_sync_debug_mode("default")
                if turn >= 5:
                    found.append(took / deep * 1e3)
            row |= {name: statistics.median(found), name.replace("_ms", "_best_ms"): min(found)}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            whole(block, 1)
            torch.cuda.synchronize()
        row[f"{who}kernels"] = sum(event.device_type.name == "CUDA" for event in profile.events())
    yield row | whole_layer(d_y, times, depth)


def whole_layer(d_y, times, depth):
    """The same of `MoELayer` on a yard of one rank, with its own router, in several readings, each a median."""
    import torch
    import torch.distributed as dist

    import moeyard as my
    import moeyard.runtime as yr

    _, hidden, inner, experts, top_k = TINY
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    row = {}
    with yr.Yard(cluster=my.Cluster(1, 1, my.Port(400e9, 3e-6), my.Port(48e9, 8e-6))) as yard:
        layers = [
            yr.MoELayer(hidden, inner, experts, top_k, yard, dtype=torch.bfloat16) for _ in range(depth)
        ]
        x = torch.randn_like(d_y)

        def took(deep):
            torch.cuda.synchronize()
            start = time.perf_counter()
            y = x
            for one in layers[:deep]:
                y = one(y)
            y.backward(d_y)
            seconds = time.perf_counter() - start
            for one in layers[:deep]:
                one.zero_grad()
            return seconds / deep * 1e3

        for name, deep in (("layer_alone", 1), ("layer", depth)):
            for _ in range(5):
                took(deep)
            readings = [[took(deep) for _ in range(times)] for _ in range(READINGS)]
            medians = [statistics.median(one) for one in readings]
            row |= {f"{name}_ms": statistics.median(medians), f"{name}_best_ms": min(map(min, readings))}
            row[f"{name}_readings_ms"] = medians
    dist.destroy_process_group()
    return row


def initial(ranks=4):
    """Seconds to draw a Mixtral layer's experts on the device, and whether several ranks draw the same as one."""
    import torch

    from moeyard.runtime import MoELayer

    _, hidden, inner, experts, top_k = SHAPES["mixtral"]

    def layer_of(rank, size):
        place = SimpleNamespace(rank=rank, size=size, device=torch.device("cuda", 0), next_site=lambda: 1)
        return MoELayer(hidden, inner, experts, top_k, place, dtype=torch.bfloat16)

    found = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        whole = layer_of(0, 1)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    shares = [layer_of(rank, ranks) for rank in range(ranks)]
    alike = all(
        torch.equal(getattr(share, name), getattr(whole, name)[share.own])
        for share in shares
        for name in whole.expert_parameter_names
    )
    yield {
        "shape": "initial mixtral",
        "first_s": found[0],
        "seconds": found[1],
        f"as_on_{ranks}_ranks": alike,
    }


def rows_of(case, options):
    if case == "tiny":
        return host(not options.no_hf)
    if case == "initial":
        return initial()
    return measure(case, options.rounds, not options.no_hf)


def table(row):
    if "share" not in row:
        return "  ".join(f"{key} {_said(value)}" for key, value in row.items())
    goal = f" (goal {GOALS[row['shape']]:.2f})" if row["shape"] in GOALS else ""
    text = f"{row['shape']:<11}{row['choices']:<9} share {row['share']:.3f}{goal}"
    text += f"  {row['ms']:.2f} ms  {row['peak']:.2f} GB, {row['beyond']:.2f} beyond weights and gradients, least {row['least']:.2f}"
    if "hf_share" in row:
        text += f"   hf {row['hf_share']:.3f}  {row['hf_peak']:.2f} GB, {row['hf_beyond']:.2f} beyond"
    return f"{text}   ceiling {row['ceiling']:.0f}, taking turns {row['ceiling_median']:.0f} TF/s"


def _said(value):
    if isinstance(value, list):
        return " ".join(map(_said, value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a JSON line a row")
    parser.add_argument("--shapes", default=",".join([*SHAPES, "tiny", "initial"]))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("bench.gpu_block needs torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench.gpu_block needs a CUDA device; torch sees none", file=sys.stderr)
        return 2
    if options.case:
        for row in rows_of(options.case, options):
            print(json.dumps(row) if options.json else table(row), flush=True)
        return 0
    failed = 0
    for case in options.shapes.split(","):
        failed |= subprocess.run(
            [sys.executable, "-m", "bench.gpu_block", *sys.argv[1:], "--case", case]
        ).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
