"""What the ranks do in the tests of the lab."""

from __future__ import annotations

import os
import socket
import sys
import time

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOO_SOCKET_IFNAME")


def plain(megabytes):
    """A script that knows nothing of labs: its environment, a sum, the seconds of an all-to-all, bytes per rail of a
    message between different rails."""
    import torch
    import torch.distributed as dist

    import moeyard.lab as lab

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    part = int(megabytes * 1e6) // world
    source, output = (
        torch.full((world, part), rank, dtype=torch.uint8),
        torch.empty(world, part, dtype=torch.uint8),
    )
    began = time.monotonic()
    dist.all_to_all_single(output, source)
    dist.barrier()
    took = time.monotonic() - began
    before = lab.ask("sent") if rank == 0 else None
    sizes = [[500_000 if {src, dst} == {0, 3} else 0 for dst in range(world)] for src in range(world)]
    dist.barrier()
    dist.all_to_all_single(
        torch.empty(sum(row[rank] for row in sizes), dtype=torch.uint8),
        torch.zeros(sum(sizes[rank]), dtype=torch.uint8),
        [row[rank] for row in sizes],
        sizes[rank],
    )
    dist.barrier()
    after = lab.ask("sent") if rank == 0 else None
    moved = (
        None
        if before is None
        else [[b - a for a, b in zip(x, y, strict=True)] for x, y in zip(before, after, strict=True)]
    )
    print(f"rank {rank} is done")
    return {
        "environment": {name: os.environ[name] for name in NAMES},
        "sum": float(total),
        "right": output[:, 0].tolist(),
        "seconds": took,
        "moved": moved,
    }


def where():
    """Where the rank thinks it is."""
    from moeyard.runtime.transport.detect import lab_place

    place = lab_place()
    return os.environ["GLOO_SOCKET_IFNAME"], place.shaped, place.interfaces


def broken_rail(timeout, steps, slow_at, cut_at):
    """Exchanges while a rail is slowed, then mended, then cut."""
    import numpy as np
    import torch
    import torch.distributed as dist

    import moeyard.lab as lab
    import moeyard.runtime as yr

    dist.init_process_group("gloo")
    rails = []
    yard = yr.Yard(
        scheduler="rails",
        timeout=timeout,
        observer=lambda stage, src, dst, rows, rail: rails.append(rail),
    )
    world, per = yard.size, 32
    source = (torch.arange(world * per * 64).view(world * per, 64) + 10_000 * yard.rank).float()
    found = {
        "cluster": yard.cluster.scale_out.bandwidth,
        "bound": yard.channels.bound,
        "dead": None,
        "seconds": 0.0,
    }
    step = 0
    while step < steps:
        if step == slow_at:
            if yard.rank == 0:
                lab.slow_rail(1, 0, 0.2)
            dist.barrier(group=yard.control.group)
            found["slow"] = np.array(yr.remeasure(yard, size=1 << 18, repeat=2).rails).tolist()
            if yard.rank == 0:
                lab.mend_rail(1, 0)
            dist.barrier(group=yard.control.group)
        output = torch.empty_like(source)
        began = time.monotonic()
        try:
            if step == cut_at and yard.generation == 0:
                if yard.rank == 0:
                    lab.break_rail(1, 1)
                dist.barrier(group=yard.control.group)
            yr.all_to_all_single(output, source, [per] * world, [per] * world, yard)
            yard.settle()
        except yr.RailLost as error:
            found["seconds"] = time.monotonic() - began
            found["message"] = str(error)
            found["dead"] = yard.recover(error, seconds=1.0)
            rails.clear()
            continue
        step += 1
    found["rails"] = sorted({rail for rail in rails if rail is not None})
    found["first"] = output.view(world, per, 64)[:, 0, 0].tolist()
    yard.close()
    return found


def _serve(where, ends):
    """Answers bytes with bytes and megabytes with one byte, until the line closes."""
    with socket.create_server(where) as server:
        peer, _ = server.accept()
        with peer:
            for size in ends:
                while size > 0:
                    size -= len(peer.recv(min(size, 1 << 16)))
                peer.sendall(b"x")


def _connect(where):
    for _ in range(100):
        try:
            return socket.create_connection(where, timeout=30)
        except OSError:
            time.sleep(0.1)
    raise OSError(f"nobody at {where}")


def _there_and_back(peer, data):
    began = time.monotonic()
    peer.sendall(data)
    peer.recv(1)
    return time.monotonic() - began


def delay(repeat):
    """From node 0, to its neighbour and to the other datacenter: the least seconds there and back, of rows and of control, and those
    of a megabyte, over the wan as it is, slowed, and cut for two seconds."""
    import moeyard.lab as lab
    import moeyard.lab.network as network
    from moeyard.runtime.transport.detect import lab_place

    rank, cluster = int(os.environ["RANK"]), lab_place().cluster
    tiny, mega = [1] * repeat, bytes(1_000_000)
    far = network.address(cluster, 2, 0), 7000
    office = network.management_address(cluster, 3), 7000
    near = network.address(cluster, 1, 0), 7000
    if rank:
        _serve({1: near, 2: far, 3: office}[rank], tiny + [len(mega)] * 3 if rank == 2 else tiny)
        return None
    found = {}
    for name, where in (("near", near), ("control", office)):
        with _connect(where) as peer:
            found[name] = min(_there_and_back(peer, b"x") for _ in tiny)
    with _connect(far) as peer:
        before = lab.ask("sent-wan")
        found["rows"] = min(_there_and_back(peer, b"x") for _ in tiny)
        found["megabyte"] = _there_and_back(peer, mega)
        lab.slow_wan(1, 0.2)
        found["slow"] = _there_and_back(peer, mega)
        lab.mend_wan(1)
        lab.break_wan(0, 2.0, after=0.2)
        found["cut"] = _there_and_back(peer, mega)
        found["moved"] = [b - a for a, b in zip(before, lab.ask("sent-wan"), strict=True)]
    try:
        lab.break_wan(2)
    except lab.LabError as error:
        found["refused"] = str(error)
    return found


def fail(rank_at_fault, how):
    """One rank fails; the others wait for ever."""
    rank = int(os.environ["RANK"])
    if rank != rank_at_fault:
        time.sleep(600)
    if how == "raise":
        raise ValueError("on purpose")
    if how == "kill":
        os.kill(os.getpid(), 9)
    sys.exit(int(how))
