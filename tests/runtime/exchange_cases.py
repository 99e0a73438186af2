"""What the ranks do in test_exchange.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moeyard as my
import moeyard.runtime as yr

SCHEDULERS = sorted(my.SCHEDULERS)


def cluster_of(nodes, per, **changes):
    return my.Cluster(nodes, per, my.Port(400e9, 1e-6), my.Port(50e9, 1e-5), **changes)


def prepare():
    """Compile or load the kernels once, before the fork."""
    for name in SCHEDULERS:
        for rails in (None, np.array([[1.0, 1.0], [0.0, 1.0]])):
            cluster = cluster_of(2, 2, rails=rails)
            traffic = my.Traffic(np.random.default_rng(0).integers(0, 9, (4, 4)), 64)
            made = my.schedule(cluster, traffic, name)
            my.lower(made, 1), my.lower(made.reversed(), 1)


def traffics(world, seed):
    """Named matrices of rows."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, 40, (world, world))
    hot = rng.integers(0, 3, (world, world))
    hot[:, 1] += 97
    sparse = np.where(rng.random((world, world)) < 0.2, rng.integers(1, 50, (world, world)), 0)
    silent = dense.copy()
    silent[0], silent[:, world - 1] = 0, 0
    return {
        "dense": dense,
        "hot": hot,
        "sparse": sparse,
        "one rank silent, one deaf": silent,
        "nothing": np.zeros((world, world), int),
        "diagonal": np.diag(rng.integers(1, 9, world)),
        "one row": np.eye(world, k=world - 1, dtype=int),
    }


def one_exchange(yard, rows, dtype=torch.float64, shape=(3,), async_op=False):
    """Compare with torch's own, values and gradients; rows carry their origin, target and place."""
    rank = yard.rank
    sent, received = rows[rank].tolist(), rows[:, rank].tolist()
    source = torch.empty(sum(sent), *shape, dtype=dtype)
    at = 0
    for target, count in enumerate(sent):
        for i in range(count):
            source[at + i] = (rank * 100 + target + i / 64) % (251 if dtype == torch.uint8 else 1e9)
        at += count
    source.requires_grad_(dtype.is_floating_point)
    output = torch.full((sum(received), *shape), -1, dtype=dtype)
    expected = torch.empty_like(output)
    dist.all_to_all_single(expected, source.detach(), received, sent)
    result = yr.all_to_all_single(output, source, received, sent, yard, async_op=async_op)
    if async_op:
        result.wait()
    assert torch.equal(output.detach(), expected), "wrong rows"
    if source.requires_grad:
        weight = torch.arange(output.numel(), dtype=dtype).reshape(output.shape) + rank
        back = torch.empty_like(source)
        dist.all_to_all_single(back, weight, sent, received)
        (output * weight).sum().backward()
        assert torch.equal(source.grad, back), "wrong gradient"


def exchanges(rank, world, nodes):
    """Every scheduler, every traffic, healthy and dead rails; the number of cases."""
    found = 0
    per = world // nodes
    clusters = {"healthy": cluster_of(nodes, per)}
    if nodes > 1:
        rails = np.ones((nodes, per))
        rails[0, 1] = 0
        clusters["dead"] = cluster_of(nodes, per, rails=rails)
        clusters["shared nics"] = cluster_of(nodes, per, nics_per_node=per // 2)
    with yr.Yard(cluster=clusters["healthy"], timeout=60) as yard:
        for health, cluster in clusters.items():
            if health == "shared nics":
                continue
            yard.set_cluster(cluster)
            for scheduler in SCHEDULERS:
                yard.choose(scheduler=scheduler)
                for name, rows in traffics(world, 1).items():
                    found += attempt(f"{health}, {scheduler}, {name}", one_exchange, yard, rows)
        rows = traffics(world, 2)["dense"]
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool):
            found += attempt(f"{dtype}", one_exchange, yard, rows, dtype)
        found += attempt("scalar rows", one_exchange, yard, rows, shape=())
        found += attempt("wide rows", one_exchange, yard, rows, shape=(2, 5, 7))
        found += attempt("async", one_exchange, yard, rows, async_op=True)
        found += attempt("many async", many_async, yard)
        found += attempt("even splits", even_splits, yard)
        found += attempt("known plan", known_plan, yard)
        found += attempt("cache", cache, yard)
        found += attempt("second derivative", second_derivative, yard)
    if nodes > 1:
        with yr.Yard(cluster=clusters["shared nics"], scheduler="fast", timeout=60) as yard:
            found += attempt("shared nics", one_exchange, yard, rows)
    with yr.Yard(
        cluster=clusters["healthy"], interfaces=["lo"] * per if nodes > 1 else None, timeout=60
    ) as yard:
        found += attempt("interfaces", one_exchange, yard, rows)
    found += attempt("collective", collective, clusters["healthy"], rows)
    found += attempt("watched", watched, clusters["healthy"], rows)
    return found


class Log:
    """A watcher."""

    def __init__(self):
        self.gathers, self.plans, self.flown = [], [], []

    def agreed(self, kind, began, ended):
        self.gathers.append((kind, began, ended))

    def planned(self, plan, began, ended):
        self.plans.append((plan, began, ended))

    def exchanged(self, flown):
        self.flown.append(flown)


def collective(cluster, rows):
    """torch's own all-to-all carries the rows: the same rows and gradients, and no message of a plan."""
    seen, log = [], Log()
    options = {"transport": "collective", "observer": lambda *message: seen.append(message), "watcher": log}
    with yr.Yard(cluster=cluster, timeout=60, **options) as yard:
        one_exchange(yard, rows)
        one_exchange(yard, rows, async_op=True)
        with pytest.raises(my.errors.InvalidCluster, match="chooses its rails itself"):
            yard.transport.post([], [])
    assert seen == []
    assert [(one.backward, one.marks) for one in log.flown] == [(False, []), (True, [])] * 2


def watched(cluster, rows):
    """A watcher is told of every gather, plan and finished exchange; its marks are the plan's own messages."""
    log = Log()
    with yr.Yard(cluster=cluster, timeout=60, watcher=log) as yard:
        sent, received = rows[yard.rank].tolist(), rows[:, yard.rank].tolist()
        source, output = torch.rand(sum(sent), 2), torch.empty(sum(received), 2)
        plan = yr.exchange_plan(output, source, received, sent, yard)
        yr.all_to_all_single(output, source, received, sent, yard, plan=plan)
        steps = plan.forward.steps
    ((kind, began, agreed),) = log.gathers
    ((planned, start, end),) = log.plans
    (flown,) = log.flown
    assert kind == "all_to_all_single"
    assert began <= agreed <= start <= end <= flown.began <= flown.ended
    assert planned is plan is flown.plan
    assert not flown.backward
    expected = {(s.number, m.peer, m.rows, True) for s in steps for m in s.sends}
    expected |= {(s.number, m.peer, m.rows, False) for s in steps for m in s.receives}
    assert {mark[:4] for mark in flown.marks} == expected
    assert all(flown.began <= mark.posted <= mark.done <= flown.ended for mark in flown.marks)


def attempt(name, function, *arguments, **options):
    """One case; what it raises carries its name and ends the rank, for the others would wait for it."""
    try:
        function(*arguments, **options)
    except Exception as error:
        raise AssertionError(f"case {name!r}: {type(error).__name__}: {error}") from error
    return 1


def many_async(yard):
    """Twelve at once, waited for in another order."""
    jobs = []
    for i in range(12):
        rows = traffics(yard.size, i)["dense"]
        sent, received = rows[yard.rank].tolist(), rows[:, yard.rank].tolist()
        source = torch.arange(sum(sent) * 4, dtype=torch.float64).reshape(-1, 4) + 1e6 * yard.rank + i
        output, expected = torch.empty(sum(received), 4).double(), torch.empty(sum(received), 4).double()
        dist.all_to_all_single(expected, source, received, sent)
        work = yr.all_to_all_single(output, source, received, sent, yard, async_op=True)
        jobs.append((work, output, expected, source))
    for work, output, expected, _ in reversed(jobs):
        work.wait()
        assert torch.equal(output, expected)


def even_splits(yard):
    source = torch.arange(yard.size * 3.0) + 100 * yard.rank
    output, expected = torch.empty_like(source), torch.empty_like(source)
    dist.all_to_all_single(expected, source)
    yr.all_to_all_single(output, source, None, None, yard)
    assert torch.equal(output, expected)


def known_plan(yard):
    """No gather where the counts are known; own splits are still checked."""
    rows = traffics(yard.size, 5)["dense"]
    sent, received = rows[yard.rank].tolist(), rows[:, yard.rank].tolist()
    source, output = torch.rand(sum(sent), 2), torch.empty(sum(received), 2)
    plan = yr.exchange_plan(output, source, received, sent, yard)
    calls = yard.whereabouts()["call"]
    expected = torch.empty_like(output)
    dist.all_to_all_single(expected, source, received, sent)
    for _ in range(3):
        yr.all_to_all_single(output, source, received, sent, yard, plan=plan)
        assert torch.equal(output, expected)
    assert yard.whereabouts()["call"] == calls
    wrong = [n + 1 for n in sent]
    with pytest.raises(yr.Mismatch, match="for rank 0"):
        yr.all_to_all_single(output, source, received, wrong, yard, plan=plan)


def cache(yard):
    rows = traffics(yard.size, 6)["dense"]
    one_exchange(yard, rows)
    hits, misses = yard.plans.hits, yard.plans.misses
    one_exchange(yard, rows)
    assert (yard.plans.hits, yard.plans.misses) == (hits + 1, misses)


def second_derivative(yard):
    rows = traffics(yard.size, 7)["dense"]
    sent, received = rows[yard.rank].tolist(), rows[:, yard.rank].tolist()
    source = torch.rand(sum(sent), 2, dtype=torch.float64, requires_grad=True)
    output = yr.all_to_all_single(torch.empty(sum(received), 2).double(), source, received, sent, yard)
    (grad,) = torch.autograd.grad((output**3).sum(), source, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), source)
    assert torch.allclose(second, 6 * source, atol=1e-12)
