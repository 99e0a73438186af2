"""When a layer begins its plans, and how a yard ends that has begun something, in test_ahead.py."""

from __future__ import annotations

import time
from unittest import mock

import numpy as np
import oracle
import torch
from ahead_models import EXPERTS, REPLICAS, models, rows, two_layers
from exchange_cases import cluster_of

import moeyard as my
import moeyard.runtime as yr
from moeyard.runtime.layers import ahead, chunks, replicas
from moeyard.runtime.state import checkpoint

WAYS = ({"chunks": 1}, {"chunks": 2}, {"dedup": True}, {"dedup": True, "chunks": 2})


def prepare():
    for nodes in (1, 2):
        cluster = cluster_of(nodes, 4 // nodes)
        demand = my.Demand(np.random.default_rng(0).integers(0, 9, (4, EXPERTS)))
        placement = my.place(cluster, demand, "quota", 2)
        traffic = my.assign(cluster, demand, placement, "quota").traffic(64)
        made = my.schedule(cluster, traffic, "auto")
        my.lower(made, 0), my.lower(made.reversed(), 0)
        yr.layers.copies.Copies.of(cluster, placement, 0)


def planned_behind(yard, rank):
    """What is still to be planned after a forward, if nobody asks for it; in each way in which rows go."""
    found = []
    for way in WAYS:
        yard.choose(**{"chunks": 1, "dedup": False} | way)
        _, ours = models(yard, 2)
        x, _ = oracle.shares(yard.size, 6)[rank]
        with torch.no_grad():
            ours(x)
        found.append(len(yard.forecasts._seen))
    yard.choose(chunks=1, dedup=False)
    layer = ours.layers[0]
    known = ahead.Layer(layer.site, "by hand", [layer.gate_up, layer.down], layer.down.dtype)
    tokens, chosen_TK = rows(rank), torch.arange(len(rows(rank)))[:, None] % EXPERTS
    there, route = yr.dispatch(tokens, chosen_TK, yard, EXPERTS, layer=known)
    yr.combine(there, route, None)
    return [*found, len(yard.forecasts._seen)]


def left(rank, world):
    """(Seconds that it takes to leave a yard with a gather under way for which one rank is late, exchanges behind the training by then)."""
    with yr.Yard(cluster=cluster_of(2, 2), timeout=20, **REPLICAS) as yard:
        first, second = two_layers(yard)
        light = yard.transport.light
        passes = light.pass_by

        def late(*job):
            time.sleep(1)
            passes(*job)

        with torch.no_grad():
            for _ in range(3):
                second(first(rows(rank)))
            if rank == 0:
                mock.patch.object(light, "pass_by", late).start()
            first(rows(rank))  # and the gather of the second goes on
        began = time.monotonic()
    return time.monotonic() - began, yard.guard.where.behind


class Failed(Exception):
    """Of one rank's own."""


def failed(rank, world):
    """(What is raised, seconds until then, seconds until the yard is left then): the experts of one rank fail, while the others wait for its
    rows, and what runs behind waits for those to pass, between two waves."""
    slow = my.Cluster(2, 2, my.Port(400e9, 1e-6), my.Port(2e5, 1e-5))  # a wave is what it carries in so long
    began = time.monotonic()
    try:
        with yr.Yard(cluster=slow, timeout=60, **REPLICAS) as yard, torch.no_grad():
            _, ours = models(yard, 2)
            x, _ = oracle.shares(yard.size, 6)[rank]
            for _ in range(3):
                ours(x)
            if rank == 0:
                mock.patch.object(chunks, "combine", side_effect=Failed).start()
            began = time.monotonic()
            try:
                ours(x)
            finally:
                raised = time.monotonic()
    except (Failed, yr.ExchangeError) as error:
        return type(error).__name__, raised - began, time.monotonic() - raised
    return "nothing", 0.0, 0.0


def unheard(rank, world):
    """(Who is to blame, whether its reason is told) after a gather for which one rank has no memory, and which nobody there waits for."""
    with yr.Yard(cluster=cluster_of(2, 2), timeout=6, **REPLICAS) as yard, torch.no_grad():
        first, second = two_layers(yard)
        fill = replicas.Hosted._fill

        def fails(hosted, *arguments):
            if hosted.site == second.site:
                raise MemoryError("no room")
            fill(hosted, *arguments)

        for _ in range(3):
            second(first(rows(rank)))
        if rank == 0:
            mock.patch.object(replicas.Hosted, "_fill", fails).start()
        try:
            first(rows(rank))  # and the gather of the second begins
            yard.choose(chunks=2)
            first(rows(rank))
        except yr.RankLost as error:
            return error.ranks, "no room" in str(error)
    return None


def saved(rank, world, folder):
    """(Whether a save that was under way when the yard was left is there, what its handle says): one rank writes late, one leaves first."""
    with yr.Yard(cluster=cluster_of(2, 2), timeout=20, **REPLICAS) as yard:
        _, model = models(yard, 2)
        write = checkpoint.write_file

        def late(*arguments):
            time.sleep(1.0 if rank == 1 else 0.0)
            return write(*arguments)

        mock.patch.object(checkpoint, "write_file", late).start()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        saving = yr.start_checkpoint(folder, model, optimizer, yard, step=1)
        time.sleep(0.0 if rank == 2 else 0.3)
    return saving.done() and saving.wait().is_dir()
