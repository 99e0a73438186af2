"""What the ranks do in test_yard.py."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exchange_cases import cluster_of, one_exchange, traffics
from exchange_cases import prepare as prepare_schedulers
from torch.distributed.device_mesh import init_device_mesh

import moeyard as my
import moeyard.runtime as yr
from moeyard.runtime.agree import ahead
from moeyard.runtime.transport.groups import Groups


def prepare():
    prepare_schedulers()
    cluster = cluster_of(2, 2)
    demand = my.Demand(np.random.default_rng(0).integers(0, 9, (4, 8)))
    my.assign(cluster, demand, my.place(cluster, demand, "quota", 1), "quota")


def groups_late(seconds):
    """Makes them, and then takes so long."""

    def late(*arguments):
        groups = Groups(*arguments)
        time.sleep(seconds)
        return groups

    return mock.patch.object(yr.yard, "Groups", late)


def opened(rank):
    """Seconds in which a yard is open of which one rank makes its groups late."""
    dist.barrier()
    began = time.monotonic()
    with groups_late(1.0 if rank == 1 else 0.0), yr.Yard(timeout=30):
        return time.monotonic() - began


def family_late(rank, world):
    """Who is to blame where one expert-parallel group of two makes its groups for longer than the time-out."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    try:
        with groups_late(6.0 * rank):
            yr.Yard(mesh, timeout=3)
    except yr.ExchangeError as error:
        return error.ranks
    return None


def basics(rank, world):
    """Opening, detection, meshes, closing, bound rails, measuring. Returns the names of what was checked."""
    assert opened(rank) > 0.9
    rows = traffics(world, 1)["dense"]
    with yr.Yard(timeout=30) as yard:
        for name in ("observer", "scheduler", "collective"):
            with pytest.raises(AttributeError):
                setattr(yard, name, None)  # nobody would read it
        assert (yard.cluster.nodes, yard.cluster.ranks_per_node) == (1, world)
        one_exchange(yard, rows)
    os.environ["GROUP_RANK"] = str(rank // 2)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with yr.Yard(mesh, timeout=30) as yard:
        assert (yard.cluster.nodes, yard.cluster.ranks_per_node) == (world // 2, 2)
        one_exchange(yard, rows)
    os.environ["GROUP_RANK"] = str(rank % 2)
    with pytest.raises(my.InvalidCluster, match="node by node"):
        yr.Yard(timeout=30)
    del os.environ["GROUP_RANK"]
    with pytest.raises(my.InvalidCluster, match="the cluster 2 nodes x 4 = 8"):
        yr.Yard(cluster=cluster_of(2, 4), timeout=30)
    with pytest.raises(my.UnknownName, match="did you mean 'fast'"):
        yr.Yard(scheduler="fats")
    yard = yr.Yard(cluster=cluster_of(2, world // 2), timeout=30)
    if Path("/proc/self/task").is_dir():
        threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
        # torch's own group has one, the mesh may have one, all groups of all yards one together
        assert threads.count("gloo_tcp_loop") <= 3, threads
    yard.close()
    yard.close()
    with pytest.raises(yr.RankLost, match="closed"):
        one_exchange(yard, rows)
    dist.barrier()
    bound_rails(world)
    bound_device(rows)
    measured(world)
    summed(rank, world)
    return "all"


def bound_device(rows):
    """As `init_process_group(device_id=...)` leaves the world on GPUs: torch then asks every new group for that device."""
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    try:
        with yr.Yard(timeout=30) as yard:
            one_exchange(yard, rows)
            assert dist.get_world_size(yard.groups.background) == yard.size
    finally:
        dist.group.WORLD.bound_device_id = None


def summed(rank, world):
    """Narrow gradients are summed in float32, and a parameter that is frozen on one rank is not waited for."""
    with yr.Yard(cluster=cluster_of(2, world // 2), timeout=30) as yard:
        model = torch.nn.Linear(3, 2).bfloat16()
        model.weight.grad = torch.full_like(model.weight, 256.0 if rank == 0 else 1.0)
        model.bias.requires_grad_(rank != 1)
        if rank != 1:
            model.bias.grad = torch.ones_like(model.bias)
        yr.sync_gradients(model, yard)
        assert model.weight.grad.dtype == torch.bfloat16
        assert bool(
            (model.weight.grad == torch.tensor(255.0 + world).bfloat16()).all()
        )  # bf16 sums stay at 256
        assert bool((model.bias.grad == world - 1).all())


def bound_rails(world):
    """Rails on interfaces: a cross-rail message rides a rail that lives at both ends."""
    per, seen = world // 2, []
    with yr.Yard(
        cluster=cluster_of(2, per),
        interfaces=["lo"] * per,
        scheduler="direct",
        timeout=30,
        observer=lambda stage, src, dst, count, rail: seen.append((src, dst, rail)),
    ) as yard:
        rows = traffics(world, 2)["dense"] + 1
        one_exchange(yard, rows)
        assert {rail for _, _, rail in seen} == {None, *range(per)}
        seen.clear()
        yard.mark_dead(1, 0)
        one_exchange(yard, rows)
        assert all(rail != 0 for _, _, rail in seen)
        with pytest.raises(my.InvalidCluster, match="no nic 9"):
            yard.mark_dead(0, 9)
    with pytest.raises(my.InvalidCluster, match="one per rail"):
        yr.Yard(cluster=cluster_of(2, per), interfaces=["lo"], timeout=30)


def measured(world):
    with yr.Yard(cluster=cluster_of(2, world // 2), timeout=30) as yard:
        layer = yr.MoELayer(16, 32, 6, 2, yard)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), layer)
        x = torch.randn(20, 16)
        spec = yr.measure(model, yard, step=lambda: model(x).sum().backward(), rows=64, repeat=3)
        assert (spec.row_bytes, spec.expert_bytes, spec.layers) == (64, 3 * 16 * 32 * 4, 1)
        assert 1e6 < spec.flops < 1e13
        cluster = yr.measure_links(yard, repeat=3)
        everyone = [None] * world
        dist.all_gather_object(everyone, (spec, cluster.scale_up, cluster.scale_out))
        assert everyone == [everyone[0]] * world
        yard.set_cluster(cluster)
        one_exchange(yard, traffics(world, 3)["dense"])
        with pytest.raises(my.InvalidModel, match="no MoELayer"):
            yr.measure(torch.nn.Linear(2, 2), yard)


def memory(rank, world, every, times):
    """In use after so many steps each, so many times. Traffic changes every step, relays included; the last five are the same each time, and
    no more is kept of the past: what is kept of one traffic is larger than of another."""
    found, fresh = [], torch.Generator().manual_seed(rank)
    options = {"scheduler": "fast", "planner": "quota", "slots": 1, "policy": "quota"}
    with (
        mock.patch.object(ahead, "REPLAYS", 4),
        yr.Yard(cluster=cluster_of(2, world // 2), timeout=60, **options) as yard,
    ):
        yard.plans.room = 4
        layer = yr.MoELayer(32, 32, 8, 2, yard)
        for _ in range(times):
            same = torch.Generator().manual_seed(world + rank)
            for left in range(every, 0, -1):
                chance = fresh if left > 5 else same
                rows = int(torch.randint(1, 200, (), generator=chance))
                layer(torch.randn(rows, 32, generator=chance, requires_grad=True)).sum().backward()
                layer.zero_grad()
            assert len(yard.plans) == yard.plans.room
            found.append(in_use())
    return found


class Allocated(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def in_use():
    """(bytes, Python's blocks), not resident memory, of which an allocator keeps what was freed: on Arm more than a leak would take."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Allocated
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd, sys.getallocatedblocks()
