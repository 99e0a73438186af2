"""Shards of FSDP2, saved and loaded by other numbers of ranks: what the ranks do in test_saves.py."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moeyard.runtime as yr
from moeyard.runtime.agree.floor import Floor
from moeyard.runtime.transport.buffers import Workspace


def prepare():
    pass


def shards(rank, world, folder, save):
    """A width that no number of ranks divides. Values are a function of the place; every rank has the whole of them at the end."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    group = dist.group.WORLD
    yard = SimpleNamespace(
        dense_control=group,
        floor=lambda call, behind=False: Floor(call, group),
        size=1,
        rank=rank,
        workspace=Workspace(),
    )
    if save:
        torch.manual_seed(1)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        yr.start_checkpoint(folder, model, optimizer, yard, step=1).wait()
    else:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        yr.load_checkpoint(folder, model, optimizer, yard)
    found = [p.full_tensor().tolist() for p in model.parameters()]
    return found + [optimizer.state[p]["exp_avg"].full_tensor().tolist() for p in model.parameters()]
