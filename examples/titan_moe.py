"""torchtitan's own MoE layer with moeyard's dispatcher, beside the same layer with torchtitan's: losses and gradients compared.

    sh examples/titan_environment.sh titan-venv
    titan-venv/bin/torchrun --nproc-per-node 4 examples/titan_moe.py [--steps 5] [--scheduler auto]

On GPUs with NCCL where there is one for every rank, else on CPUs with gloo. Exit status 1 if the two differ.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from moeyard import titan
from moeyard.train.device import SHARED

DIM, INNER, EXPERTS, TOP_K, LAYERS = 64, 96, 8, 2, 2
LIMIT = 2e-2  # torchtitan's experts compute in bfloat16: 8 bits a value


def layer(dispatcher):
    experts = GroupedExperts.Config(dim=DIM, hidden_dim=INNER, num_experts=EXPERTS)
    gate = Linear.Config(in_features=DIM, out_features=EXPERTS)
    router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP_K, route_norm=True)
    routed = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)
    return MoE.Config(
        num_experts=EXPERTS, routed_experts=routed, router=router, load_balance_coeff=None
    ).build()


def model(dispatcher, mesh, device):
    """Layers with the same weights on whichever dispatcher; every rank keeps its share of the experts."""
    torch.manual_seed(1)
    layers = nn.ModuleList(layer(dispatcher) for _ in range(LAYERS))
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    share = EXPERTS // mesh.size()
    own = slice(mesh.get_local_rank() * share, (mesh.get_local_rank() + 1) * share)
    for one in layers:
        inner = one.routed_experts.inner_experts
        for name, parameter in list(inner.named_parameters()):
            setattr(inner, name, nn.Parameter(parameter.data[own].clone()))
        one.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layers.to(device)


def step(layers, optimizer, x):
    """(loss, gradients) of this rank's tokens."""
    h = x
    for one in layers:
        h = h + one(h)
    loss = ((h - x.roll(1, dims=-1)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    found = [parameter.grad.clone() for parameter in layers.parameters()]
    optimizer.step()
    return loss.detach(), found


def apart(mine, theirs):
    return float((mine - theirs).norm() / theirs.norm().clamp(min=1e-12))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--scheduler", default="auto")
    parser.add_argument(
        "--share-gpu", action="store_true", help="several ranks on one GPU, as hosts of their own to NCCL"
    )
    options = parser.parse_args()
    gpus, ranks = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    gpu = gpus >= ranks or (gpus > 0 and options.share_gpu)
    if gpu:
        if gpus < ranks:
            os.environ |= SHARED | {"NCCL_HOSTID": f"rank{os.environ['RANK']}"}
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    set_spmd_backend("default")  # its trainer would set up typed meshes, which its own dispatcher asks for
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
    configs = [
        titan.Dispatcher.Config(**sizes, scheduler=options.scheduler),
        AllToAllTokenDispatcher.Config(**sizes),
    ]
    models = [model(config, mesh, device) for config in configs]
    optimizers = [torch.optim.AdamW(layers.parameters(), lr=1e-2) for layers in models]
    worst = 0.0
    for number in range(options.steps):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x = torch.randn(2, 24, DIM, generator=generator).to(device)
        (loss, grads), (wanted, theirs) = (
            step(layers, optimizer, x) for layers, optimizer in zip(models, optimizers, strict=True)
        )
        found = max(apart(a, b) for a, b in zip(grads, theirs, strict=True))
        worst = max(worst, found, apart(loss, wanted))
        if dist.get_rank() == 0:
            print(
                f"step {number}: loss {loss:.6f}, torchtitan's own {wanted:.6f}; gradients apart {found:.1e}"
            )
    everywhere = torch.tensor(worst, device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {device.type}: largest relative difference {everywhere:.1e}")
    titan.close()
    dist.destroy_process_group()
    sys.exit(int(everywhere > LIMIT))


if __name__ == "__main__":
    main()
