"""What the ranks do in test_order.py: one rank is in another layer, has other homes, or another wish. All must say who, at once."""

from __future__ import annotations

import copy
import time

import numpy as np
import torch
from exchange_cases import cluster_of, one_exchange, traffics
from exchange_cases import prepare as prepare_schedulers

import moeyard as my
import moeyard.runtime as yr

EXPERTS = 8


def prepare():
    prepare_schedulers()


def said(call):
    """(kind of error, its ranks, its text), or what came out; and in how many seconds."""
    began = time.monotonic()
    try:
        found = call()
    except (yr.ExchangeError, my.errors.MoeyardError, ValueError) as error:
        found = type(error).__name__, getattr(error, "ranks", None), str(error)
    return found, time.monotonic() - began


def yard_of(world, **options):
    return yr.Yard(cluster=cluster_of(2, world // 2), scheduler="fast", timeout=20, **options)


def layers(rank, world, guilty):
    """Two equal layers, run in another order by one rank; then a layer and its copy; then as they should."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    with yard_of(world) as yard:
        first, second = (yr.MoELayer(4, 8, EXPERTS, 2, yard, seed=seed) for seed in (1, 2))
        third = copy.deepcopy(second)
        found = []
        for a, b in ((first, second), (second, third)):
            b.router.load_state_dict(a.router.state_dict())  # so that the counts tell nothing
            order = (b, a) if rank == guilty else (a, b)
            found.append(said(lambda order=order: [layer(x) for layer in order]))
        healthy = said(lambda: float(third(second(first(x))).sum()))
    return found, healthy


def homes(rank, world, guilty):
    """The plan of these homes is in everyone's cache, but one rank comes with others; then with another placement."""
    x, index = torch.ones(4, 3), (torch.arange(8) % EXPERTS).view(4, 2)
    usual = np.arange(EXPERTS) % world
    other = usual[::-1].copy()
    with yard_of(world) as yard:
        yr.dispatch(x, index, yard, EXPERTS, home_E=usual)
        mine = other if rank == guilty else usual
        found = [said(lambda: len(yr.dispatch(x, index, yard, EXPERTS, home_E=mine)[0]))]
        hosts = np.zeros((EXPERTS, world), bool)
        hosts[np.arange(EXPERTS), usual] = True
        hosts[0] |= rank == guilty
        placed = my.Placement(usual, hosts, "static")
        found.append(said(lambda: len(yr.dispatch(x, index, yard, EXPERTS, placement=placed)[0])))
        return found, said(lambda: len(yr.dispatch(x, index, yard, EXPERTS, home_E=usual)[0]))


def changes(rank, world, guilty):
    """One rank changes nothing, or there and back: its plans must not be other than the others'."""
    rows, healthy = traffics(world, 3)["dense"] + 1, cluster_of(2, world // 2)
    found = []
    with yard_of(world) as yard:
        one_exchange(yard, rows)
        if rank == guilty:
            yard.choose(scheduler="fast")
        found.append(said(lambda: one_exchange(yard, rows)))
        if rank == guilty:
            yard.mark_dead(0, 0)
            yard.set_cluster(healthy)
        found.append(said(lambda: one_exchange(yard, rows)))
        hits, misses = yard.plans.hits, yard.plans.misses
    return found, hits, misses


def moves(rank, world, guilty):
    """Homes that one rank alone cannot take, or wants otherwise: every rank raises and nothing has moved."""
    x = torch.ones(4, 4)
    odd = rank == guilty
    with yard_of(world) as yard:
        layer = yr.MoELayer(4, 8, EXPERTS, 2, yard)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(x).sum().backward()
        optimizer.step()
        before = layer.gate_up.detach().clone(), layer.home_E.copy()
        usual = layer.home_E.copy()
        other = np.roll(usual, 2)

        def move(homes=other, optimizer=optimizer):
            return said(lambda: yr.move_experts(layer, yard, homes, optimizer))

        found = {"out of range": move(np.full(EXPERTS, world) if odd else other)}
        found["ragged"] = move([[0], [0, 1]] if odd else other)
        found["other homes"] = move(usual[::-1].copy() if odd else other)
        found["no move"] = move(usual if odd else other)
        found["no optimizer"] = move(optimizer=None if odd else optimizer)
        plain = torch.optim.AdamW(layer.parameters())
        plain.state[layer.gate_up] = {"exp_avg": torch.zeros_like(layer.gate_up)}
        found["other state"] = move(optimizer=plain if odd else optimizer)
        same = torch.equal(layer.gate_up, before[0]) and (layer.home_E == before[1]).all()
        found["as it should"] = move()
        again = said(lambda: layer(x).shape == x.shape)
    return found, bool(same), again


def meshes(rank, world):
    """A mesh whose ranks do not ascend; one whose do."""
    from torch.distributed.device_mesh import DeviceMesh

    rows, found = traffics(world, 3)["dense"] + 1, []
    for ranks in (range(world)[::-1], range(world)):
        mesh = DeviceMesh("cpu", list(ranks))

        def exchange(mesh=mesh):
            with yr.Yard(mesh, cluster=cluster_of(2, world // 2), scheduler="fast", timeout=20) as yard:
                one_exchange(yard, rows)

        found.append(said(exchange))
    return found


def unplanned(rank, world):
    """Rows that torch's own all-to-all carries travel on a group of the yard, not on the user's."""
    rows = traffics(world, 3)["dense"] + 1
    with yard_of(world, transport="collective") as yard:
        one_exchange(yard, rows)
        group = yard.transport._deck.group
        own = group is not torch.distributed.group.WORLD and group in yard.groups._own
    return own, group.size()


def calls(rank, world, guilty, folder):
    """One rank gives another number to a call of all: each would go on silently with what does not belong together."""
    odd = rank == guilty
    with yard_of(world) as yard:
        layer = yr.MoELayer(4, 8, EXPERTS, 2, yard)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.ones(4, 4)).sum().backward()
        found = {
            "sync": said(lambda: yr.sync_gradients(layer, yard, scale=0.5 if odd else 1.0)),
            "clip": said(lambda: yr.clip_grad_norm_(layer, 2.0 if odd else 1.0, yard)),
            "loss": said(
                lambda: yr.global_count(3, yard) if odd else yr.global_mean(torch.ones(()), 3, yard)
            ),
            "save": said(lambda: yr.save_checkpoint(folder, layer, optimizer, yard, step=7 if odd else 8)),
        }
        if odd:
            layer.router.to(torch.bfloat16)
        found["dtype"] = said(lambda: yr.sync_gradients(layer, yard))
        layer.router.to(torch.float32)
        behind = yr.start_checkpoint(folder, layer, optimizer, yard, step=7 if odd else 8)
        found["save behind"] = said(behind.wait)
        return found, said(lambda: yr.save_checkpoint(folder, layer, optimizer, yard, step=9).name)
