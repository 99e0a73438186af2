"""What the ranks do in test_ahead.py."""

from __future__ import annotations

import time
from unittest import mock

import numpy as np
import oracle
import torch
import torch.distributed as dist
from ahead_models import EXPERTS, REPLICAS, models, rows, two_layers
from behind_cases import planned_behind, prepare
from exchange_cases import cluster_of
from oracle_cases import check, gradient_errors, one_step
from torch import nn

import moeyard as my
import moeyard.runtime as yr
from moeyard.runtime.layers import chunks

MOST_ROWS = 8  # of a dozen or more that a rank gets
__all__ = ["everything", "prepare"]


def everything(rank, world, steps, cases):
    """{case: what it gave}, of `cases`."""
    found = {}

    def run(*calls):
        """Each of these functions with its arguments, under its name."""
        for one, *given in calls:
            if (name := one.__name__.replace("_", " ")) in cases:
                found[name] = one(*given)

    with yr.Yard(cluster=cluster_of(2, 2), timeout=60, checked=True, **REPLICAS) as yard:
        for name, options, layers, accumulation, checkpointed in (
            ("resident", {"resident": True}, 2, 1, False),
            ("two slots", {"resident": False}, 3, 1, False),
            ("accumulated", {"resident": True}, 2, 2, False),
            ("two slots, accumulated, checkpointed", {"resident": False}, 3, 2, True),
            ("checkpointed", {"resident": True}, 2, 1, True),
            ("on the spot", {"ahead": False, "resident": False}, 2, 1, False),
            ("planned, on the spot", {"overlap": False}, 2, 1, True),
            ("chunks", {"chunks": 2}, 3, 1, False),
            ("chunks, checkpointed", {"chunks": 2}, 2, 1, True),
            ("chunks, on the spot", {"chunks": 2, "ahead": False}, 2, 2, False),
            ("in parts", {"most_rows": MOST_ROWS}, 2, 1, False),
            ("in parts that cross once", {"most_rows": MOST_ROWS, "dedup": True, "chunks": 2}, 2, 1, True),
        ):
            yard.choose(
                **{
                    "ahead": True,
                    "overlap": True,
                    "resident": True,
                    "chunks": 1,
                    "most_rows": None,
                    "dedup": False,
                }
                | options
            )
            if name in cases:
                count = steps if name == "resident" else 10
                found[name] = trained(yard, world, count, layers, accumulation, checkpointed)
        yard.choose(ahead=True, resident=True, chunks=1, checked=False, most_rows=None, dedup=False)
        run(
            (in_flight, yard, world),
            (inferred, yard, rank),
            (given_away, yard),
            (limit, yard, rank),
            (touched, yard, rank),
        )
        run(
            (asked_for, yard, rank),
            (order, yard, rank),
            (evaluated, yard, rank),
            (planned_behind, yard, rank),
        )
    with yr.Yard(cluster=cluster_of(2, 2), timeout=60, **REPLICAS) as yard:
        run((as_data, yard, rank), (homes_by_themselves, yard, world), (chosen, yard, rank))
    run((slots, rank), (odd, rank, world))
    return found


def trained(yard, world, steps, layers, accumulation, checkpointed):
    """SGD beside one process: the largest error of any step, and how often a gather was ahead."""
    plain, ours = models(yard, layers, checkpointed)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (plain, ours)]
    yard.workspace.ahead = yard.workspace.spot = 0
    worst, placements, moved = 0.0, set(), 0
    filled = yard.workspace.turn
    for step in range(steps):
        for model in (plain, ours):
            for layer in model.layers:
                layer.router.turn = step
        batches = [oracle.shares(world, 100 + accumulation * step + i) for i in range(accumulation)]
        worst = max(worst, check(f"step {step}", one_step(yard, plain, ours, batches, max_norm=1e6)))
        for optimizer in optimizers:
            optimizer.step()
        coming = yard.forecasts.coming(ours.layers[0].site)
        placements.add(None if coming is None else coming.digest)
        if step == steps // 2:  # homes move in the middle
            homes = np.roll(ours.layers[0].home_E, 1)
            homes[0] = homes[1]  # one rank has more than the others from now on
            moved = yr.move_experts(ours, yard, homes, optimizers[1])
    return {
        "worst": worst, "filled": yard.workspace.turn - filled, "ahead": yard.workspace.ahead, "spot": yard.workspace.spot, "plans": len(placements), "moved": moved,
    }  # fmt: skip


def in_flight(yard, world):
    """Several forwards before the first backward, as pipelines have them, checkpointed; of two micro-batches the tokens are the same, and
    the placement that is planned between them is another: the gradients of one process, and how often they were served alike."""
    plain, ours = models(yard, 2, checkpointed=True)
    seeds, alike, answers = (300, 301, 302, 300), [], yard.forecasts.alike

    def told(site, demand):
        alike.append(answers(site, demand))
        return alike[-1]

    batches = [oracle.shares(world, seed) for seed in seeds]
    with mock.patch.object(yard.forecasts, "alike", told):
        waiting = [oracle.loss_sum(ours(batch[yard.rank][0]), batch[yard.rank][1])[0] for batch in batches]
        served = sum(one is not None for one in alike)
        for loss in reversed(waiting):
            loss.backward()
        alike.clear()
        ours(batches[0][yard.rank][0])
    for batch in batches:
        tokens, targets = (torch.cat([part[i] for part in batch]) for i in (0, 1))
        oracle.loss_sum(plain(tokens), targets)[0].backward()
    yr.sync_gradients(ours, yard)
    worst = check("in flight", gradient_errors(yard, plain, ours))
    return {"worst": worst, "alike": served, "later": [one is not None for one in alike]}


def inferred(yard, rank):
    """The same in inference mode as without gradients, by schedules whose chains of stages have threads of their own."""
    _, ours = models(yard, 2)
    x, _ = oracle.shares(yard.size, 6)[rank]
    found = []
    for scheduler in ("direct", "rails", "fast"):
        yard.choose(scheduler=scheduler)
        with torch.no_grad():
            wanted = ours(x)
        with torch.inference_mode():
            found.append(oracle.relative(ours(x), wanted))
    yard.choose(scheduler="auto")
    return max(found)


def given_away(yard):
    """Three experts on four ranks; a rank gives its only one away, and gets it back."""
    layer = yr.MoELayer(oracle.HIDDEN, oracle.INNER, 3, 1, yard, dtype=torch.float64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before, homes = layer.gate_up.detach().clone(), layer.home_E.copy()
    moved = [yr.move_experts(layer, yard, to, optimizer) for to in (np.array([1, 2, 3]), homes)]
    return moved, bool(torch.equal(layer.gate_up, before))


def slots(rank):
    """(What is said of replicas that share two slots, what they hold): layers of which one is three times the other, evaluated twice."""
    with yr.Yard(cluster=cluster_of(2, 2), timeout=60, resident=False, **REPLICAS) as yard:
        layers = torch.nn.Sequential(
            *(yr.MoELayer(oracle.HIDDEN, inner, EXPERTS, 2, yard, dtype=torch.float64) for inner in (2, 6, 2))
        )
        said = yard.memory(layers, 16, 2, oracle.HIDDEN, torch.float64).replicas
        with torch.no_grad():
            for _ in range(3):
                layers(rows(rank))
        return said, yard.workspace.held_bytes


def limit(yard, rank):
    """Rows that a rank receives at once, and in how many parts, without a limit, with one, and with one that no part can keep."""
    _, ours = models(yard, 1)
    x, _ = oracle.shares(yard.size, 5)[rank]
    made, plan = [], chunks.plan_routes

    def noted(*arguments, **named):
        made.append(plan(*arguments, **named))
        return made[-1]

    found = {"memory": []}
    with mock.patch.object(chunks, "plan_routes", noted):
        for most in (None, MOST_ROWS, 1):
            yard.choose(most_rows=most)
            found["memory"].append(yard.memory(ours, 16, 2, oracle.HIDDEN, torch.float64))
            try:
                ours(x)
                found[most] = [sum(route.counts) for route in made.pop()]
            except my.MoeyardError as error:
                found[most] = str(error)
    yard.choose(most_rows=None)
    return found


def homes_by_themselves(yard, world):
    """One rank's experts stay hot: they are spread over the ranks once, exactly, and then they stay."""
    model = my.ModelSpec(row_bytes=8 * oracle.HIDDEN, expert_bytes=4096, expert_flops=1e6, flops=1e9)
    yard.choose(planner="static", slots=0, model=model)
    plain, ours = models(yard, 2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, ours)]
    worst, moved = 0.0, []
    for step in range(6):
        for one in (plain, ours):
            for layer in one.layers:
                layer.router.turn, layer.router.wide = 0, 2
        worst = max(worst, check(f"step {step}", one_step(yard, plain, ours, [oracle.shares(world, step)])))
        for optimizer in optimizers:
            optimizer.step()
        moved.append(yr.rehome(ours, yard, optimizers[1], steps=10_000))
    homes = [np.bincount(layer.home_E, minlength=world).tolist() for layer in ours.layers]
    return {"worst": worst, "moved": moved, "homes": homes}


def touched(yard, rank):
    """Parameters that change between two layers' calls, on every rank or on one: never old ones."""
    first, second = two_layers(yard)
    with torch.no_grad():
        for _ in range(3):
            first(rows(rank)), second(rows(rank))
        found, before = [], yard.workspace.ahead
        for how in ("written", "on one rank", "stepped", "another tensor"):
            first(rows(rank))
            if how == "written" or (how == "on one rank" and rank == 0):
                second.down.mul_(1.5)
            elif how == "stepped":
                second.down.grad = torch.ones_like(second.down)
                torch.optim.SGD([second.down], lr=0.1).step()
            elif how == "another tensor":
                second.down = nn.Parameter(second.down.detach() * 2)
            got = second(rows(rank))
            yard.choose(ahead=False)
            expected = second(rows(rank))
            yard.choose(ahead=True)
            first(rows(rank)), second(rows(rank)), first(rows(rank)), second(rows(rank))
            found.append(float((got - expected).abs().max()))
    return {"errors": found, "ahead": yard.workspace.ahead - before}


def asked_for(yard, rank):
    """torch.autograd.grad gives what backward would."""
    first, second = two_layers(yard)
    for _ in range(3):
        x = rows(rank).requires_grad_()
        out = second(first(x)).square().sum()
        given = torch.autograd.grad(out, [first.down, second.down], retain_graph=False)
    out = second(first(rows(rank).requires_grad_())).square().sum()
    out.backward()
    return [
        float((a - b).abs().max()) for a, b in zip(given, (first.down.grad, second.down.grad), strict=True)
    ]


class Log:
    """A watcher that keeps what ran behind."""

    def __init__(self):
        self.behind = []

    def agreed(self, kind, began, ended): ...
    def planned(self, plan, began, ended): ...

    def exchanged(self, flown):
        if flown.behind:
            self.behind.append((flown.backward, flown.began, flown.ended))


class Slow(torch.autograd.Function):
    """Computation that takes its time, and says when."""

    @staticmethod
    def forward(ctx, x, spans, name):
        ctx.spans, ctx.name = spans, name
        return slow(x, spans, name)

    @staticmethod
    def backward(ctx, grad):
        return slow(grad, ctx.spans, f"{ctx.name} backward"), None, None


def slow(x, spans, name):
    began = time.monotonic()
    time.sleep(0.15)
    spans[name] = (began, time.monotonic())
    return x.clone()


def order(yard, rank):
    """The second layer's gather lies under what comes between the layers, its reduce under the first's backward."""
    log, spans = Log(), {}
    with yr.Yard(cluster=cluster_of(2, 2), timeout=60, watcher=log, **REPLICAS) as watched:
        first, second = two_layers(watched)
        for _ in range(4):
            log.behind.clear()
            dist.barrier()
            x = rows(rank).requires_grad_()
            middle = Slow.apply(first(x), spans, "between")
            second(middle).square().sum().backward()
    gathers = [(a, b) for backward, a, b in log.behind if not backward]
    reduces = [(a, b) for backward, a, b in log.behind if backward]
    return {
        "gathers": len(gathers),
        "reduces": len(reduces),
        "gather behind": any(spans["between"][0] - 0.1 < a and b < spans["between"][1] for a, b in gathers),
        "reduce behind": any(
            spans["between backward"][0] - 0.1 < a and b < spans["between backward"][1] for a, b in reduces
        ),
    }


def as_data(yard, rank):
    """The next step of two layers, by digest, and how many tiers its gathers have."""
    found = [yr.next_step(yard)]
    first, second = two_layers(yard)
    with (
        torch.no_grad()
    ):  # else this call waits for its backward, and the next with its counts is served as it was
        second(first(rows(rank)))
    second(first(rows(rank)))
    plan = yr.next_step(yard)
    begun = yard.workspace.held
    used = [held.copies.layer.hops_H4.tolist() for held in begun.values()]
    planned = [layer.hops_H4.tolist() for layer in plan.layers[-2:]]
    found.append((plan.digest, len(plan.layers), plan.resident, str(plan).splitlines()[0]))
    return (
        found,
        used == planned,
        my.plan_step(yard.cluster, [layer.placement for layer in plan.layers]).digest == plan.digest,
    )


def chosen(yard, rank):
    """Schedulers that were asked for in the foreground, call by call, on rows that differ from call to call."""
    yard.choose(scheduler="auto", **REPLICAS)
    real, asked, calls = yr.agree.agreement.make_plan, [], []

    def make(cluster, traffic, scheduler, rank):
        asked.append(scheduler)
        return real(cluster, traffic, scheduler, rank)

    (layer, _), yr.agree.agreement.make_plan = two_layers(yard), make
    try:
        for i in range(4):
            asked.clear()
            layer(rows(rank)[: 16 - i - rank])
            calls.append(tuple(asked))
    finally:
        yr.agree.agreement.make_plan = real
    return calls


def evaluated(yard, rank):
    """Without gradients, and training after it."""
    yard.workspace.clear()
    first, second = two_layers(yard)
    results = []
    for gradients in (False, True, False, True, False):
        # The first memory for replicas is taken in inference mode, which must not stick to it.
        with torch.set_grad_enabled(True) if gradients else torch.inference_mode():
            y = second(first(rows(rank)))
        results.append(y.detach())
        if gradients:
            y.square().sum().backward()
    return float(max((one - results[0]).abs().max() for one in results))


def odd(rank, world):
    """A rank that plans otherwise from the same counts is named before its plan is used."""
    with yr.Yard(cluster=cluster_of(2, 2), timeout=30, **REPLICAS) as yard:
        first, second = two_layers(yard)
        real = yr.layers.ahead.choose_placement

        def other(cluster, options, demand, home_E, top_k):
            found = real(cluster, options, demand, home_E, top_k)
            if rank != 2 or isinstance(demand, my.Demand):
                return found
            return my.Placement.of_homes(home_E, yard.size)

        yr.layers.ahead.choose_placement = other
        try:
            for _ in range(3):
                second(first(rows(rank)))
        except yr.ExchangeError as error:
            return type(error).__name__, list(error.ranks), str(error)
        finally:
            yr.layers.ahead.choose_placement = real
    return "nothing"
