"""What the ranks do in test_off.py."""

from __future__ import annotations

import contextlib
import io
import os

import pytest
import torch
from exchange_cases import cluster_of, one_exchange, traffics
from exchange_cases import prepare as prepare_schedulers

import moeyard.runtime as yr
from moeyard.runtime.transport.collective import Collective
from moeyard.runtime.transport.gloo import Flight


def prepare():
    prepare_schedulers()


def layer_of(yard):
    return yr.MoELayer(8, 8, 6, 2, yard, seed=1, dtype=torch.float64)


def off(rank, world):
    """(what was said, loss and gradients with and without moeyard, whether messages were planned)."""
    sends = []
    options = {"cluster": cluster_of(2, world // 2), "planner": "quota", "slots": 1, "timeout": 30}
    options["observer"] = lambda *message: sends.append(message)
    found = {}
    for switch in ("on", "off"):
        os.environ["MOEYARD"] = switch
        said = io.StringIO()
        with contextlib.redirect_stderr(said), yr.Yard(**options) as yard:
            yard.choose(policy="quota")  # what a job chooses later is off too
            torch.manual_seed(rank)
            layer = layer_of(yard)
            x = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
            loss = (layer(x) ** 2).sum()
            loss.backward()
            found[switch] = {
                "said": said.getvalue(),
                "loss": float(loss.detach()),
                "grad": x.grad.clone(),
                "experts": layer.gate_up.grad.clone(),
                "collective": isinstance(yard.transport, Collective),
                "planned": len(sends),
                "copies": yard.options.planner != "static",
            }
            sends.clear()
    return found


def one_rank_off(rank, world, victim):
    os.environ["MOEYARD"] = "off" if rank == victim else "on"
    with pytest.raises(yr.Mismatch, match="config") as caught:
        yr.Yard(cluster=cluster_of(2, world // 2), timeout=30)
    return caught.value.ranks


def checked(rank, world, off):
    """(alike before any plan, alike after some, the error when one rank's planned exchange goes wrong)."""
    os.environ["MOEYARD"] = "off" if off else "on"
    with yr.Yard(cluster=cluster_of(2, world // 2), scheduler="fast", timeout=30) as yard:
        fresh = yard.self_check()
        for rows in traffics(world, 5).values():
            if rows.any():
                one_exchange(yard, rows)
        used = yard.self_check()
        plans = len(yard.plans)
        real = Flight.run

        def wrong(flight):
            real(flight)
            output = flight._spaces._spaces[2]
            if len(output) > 1:
                output[1] += 1

        if rank == 1:
            Flight.run = wrong
        try:
            with pytest.raises(yr.Mismatch) as caught:
                yard.self_check()
        finally:
            Flight.run = real
        again = yard.self_check()  # the yard can go on
    return fresh, used, again, plans, str(caught.value), caught.value.ranks
