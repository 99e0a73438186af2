"""What the ranks do in test_links.py."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from exchange_cases import one_exchange, traffics
from exchange_cases import prepare as prepare

import moeyard.runtime as yr
from moeyard.formats.measured import link_data


def known(rank, world, folder):
    """A yard that measures, one that finds what was measured, one after the file was spoilt: (links, seconds) of each."""
    os.environ["MOEYARD_CACHE"] = folder
    found = []
    for nodes in (world // 2, world // 2, 1, world // 2):
        os.environ["GROUP_RANK"] = str(rank * nodes // world)
        if len(found) == 3:
            dist.barrier()
            if rank == 0:
                for path in Path(folder).iterdir():
                    path.write_text("{")
            dist.barrier()
        with yr.Yard(cluster="measure", timeout=30) as yard:
            one_exchange(yard, traffics(world, 1)["dense"])
            found.append((link_data(yard.cluster), yard.links.seconds))
    return found


def alone(rank, world, folder):
    os.environ["MOEYARD_CACHE"] = folder
    with yr.Yard(cluster="measure", timeout=30) as yard:
        return yard.cluster.nodes, yard.links.seconds
