"""What the ranks do in test_links.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist
from exchange_cases import one_exchange, traffics
from exchange_cases import prepare as prepare

import moeyard.runtime as yr
from moeyard.formats.measured import link_data
from moeyard.runtime.transport import links


def known(rank, world, folder):
    """A yard that measures, one that finds what was measured, one on another cluster, one after the file was spoilt, one that finds a network
    a thousand times as fast as this: (links, seconds) of each."""
    os.environ["MOEYARD_CACHE"] = folder
    found = []
    for turn, nodes in enumerate((world // 2, world // 2, 1, world // 2, world // 2)):
        os.environ["GROUP_RANK"] = str(rank * nodes // world)
        links.AGREES = 30.0 if turn == 4 else 1e9  # the machine may be busy
        dist.barrier()
        if rank == 0 and turn >= 3:
            for path in Path(folder).iterdir():
                kept = json.loads(path.read_text()) if turn == 4 and path.read_text() != "{" else None
                path.write_text(
                    "{"
                    if kept is None
                    else json.dumps(kept | {"scale_out": [1e3 * kept["scale_out"][0], 1e-9]})
                )
        dist.barrier()
        with yr.Yard(cluster="measure", timeout=30) as yard:
            one_exchange(yard, traffics(world, 1)["dense"])
            found.append((link_data(yard.cluster), yard.links.seconds))
    return found


def alone(rank, world, folder):
    os.environ["MOEYARD_CACHE"] = folder
    with yr.Yard(cluster="measure", timeout=30) as yard:
        return yard.cluster.nodes, yard.links.seconds
