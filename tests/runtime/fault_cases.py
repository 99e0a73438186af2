"""What the ranks do in test_faults.py: one rank errs, all must say who."""

from __future__ import annotations

import os
import re
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exchange_cases import cluster_of, one_exchange, traffics
from exchange_cases import prepare as prepare_schedulers

import moeyard.runtime as yr
from moeyard.runtime import yard as yards
from moeyard.runtime.agree import agreement


def prepare():
    prepare_schedulers()


def exchange(
    yard, rows, *, sent=None, received=None, dtype=torch.float32, width=3, grad=False, source_rows=None
):
    """One call with this rank's side changed."""
    sent = rows[yard.rank].tolist() if sent is None else sent
    received = rows[:, yard.rank].tolist() if received is None else received
    count = sum(rows[yard.rank].tolist()) if source_rows is None else source_rows
    source = torch.zeros(count, width, dtype=dtype, requires_grad=grad)
    output = torch.empty(max(0, sum(rows[:, yard.rank].tolist())), width, dtype=dtype)
    yr.all_to_all_single(output, source, received, sent, yard)


def changed(values, at, by):
    values = list(values)
    values[at] += by
    return values


# What the guilty rank `me` does; `peer` is another rank.
def more_rows(yard, rows, me, peer):
    if yard.rank == me:
        exchange(yard, rows, sent=changed(rows[me], peer, 1), source_rows=int(rows[me].sum()) + 1)
    else:
        exchange(yard, rows)


def expects_more(yard, rows, me, peer):
    if yard.rank == me:
        received = changed(rows[:, me], peer, 1)
        source = torch.zeros(int(rows[me].sum()), 3)
        yr.all_to_all_single(torch.empty(sum(received), 3), source, received, rows[me].tolist(), yard)
    else:
        exchange(yard, rows)


def wrong_sum(yard, rows, me, peer):
    exchange(yard, rows, sent=changed(rows[me], peer, 5) if yard.rank == me else None)


def negative(yard, rows, me, peer):
    exchange(yard, rows, sent=changed(rows[me], peer, -1000) if yard.rank == me else None)


def too_few_splits(yard, rows, me, peer):
    exchange(yard, rows, sent=rows[me].tolist()[:-1] if yard.rank == me else None)


def other_dtype(yard, rows, me, peer):
    exchange(yard, rows, dtype=torch.int32 if yard.rank == me else torch.float32)


def other_width(yard, rows, me, peer):
    exchange(yard, rows, width=4 if yard.rank == me else 3)


def other_grad(yard, rows, me, peer):
    exchange(yard, rows, grad=yard.rank == me)


def other_call(yard, rows, me, peer):
    if yard.rank == me:
        yr.dispatch(torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), yard, 8)
    else:
        exchange(yard, rows)


def other_cluster(yard, rows, me, peer):
    healthy = yard.cluster
    if yard.rank == me:
        yard.mark_dead(0, 0)
    try:
        exchange(yard, rows)
    finally:
        yard.set_cluster(healthy)


def other_plan(yard, rows, me, peer):
    """The planner itself differs on one rank: same counts, same options."""
    real = agreement.schedule
    if yard.rank == me:
        agreement.schedule = lambda cluster, traffic, name: real(cluster, traffic, "ecmp")
    yard.plans.clear()
    try:
        exchange(yard, rows)
    finally:
        agreement.schedule = real


def bad_expert(yard, rows, me, peer):
    index = torch.zeros(2, 1, dtype=torch.int64)
    if yard.rank == me:
        index[1] = 99
    yr.dispatch(torch.zeros(2, 3), index, yard, 8)


def other_experts(yard, rows, me, peer):
    yr.dispatch(torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), yard, 9 if yard.rank == me else 8)


MISMATCHES = {  # fault -> what every rank's message must say
    more_rows: r"^rank {me} -> rank {peer}: rank {me} sends",
    expects_more: r"^rank {peer} -> rank {me}: .* rank {me} expects",
    wrong_sum: r"^rank {me}: input has",
    negative: r"^rank {me}: split size -\d+ for rank {peer}",
    too_few_splits: r"^rank {me}: 3 split sizes for 4 ranks",
    other_dtype: r"rank {me}\b.*disagree on dtype",
    other_width: r"rank {me}\b.*disagree on row_bytes",
    other_grad: r"rank {me}\b.*disagree on grad",
    other_call: r"rank {me}\b.*disagree on kind",
    other_cluster: r"rank {me}\b.*disagree on config",
    other_plan: r"rank {me}\b.*planned differently",
    bad_expert: r"^rank {me}: a token asks for expert 99, but experts are 0..7",
    other_experts: r"rank {me}\b.*disagree on length",
}


def mismatches(rank, world, faults):
    """`faults` injected mismatches, each followed by a healthy exchange; (fault, guilty rank) of those that were named."""
    rng = np.random.default_rng(0)
    named = []
    with yr.Yard(cluster=cluster_of(2, world // 2), scheduler="fast", timeout=30) as yard:
        for i in range(faults):
            fault, pattern = list(MISMATCHES.items())[i % len(MISMATCHES)]
            me, peer = rng.choice(world, 2, replace=False).tolist()
            rows = rng.integers(1, 9, (world, world))
            started = time.monotonic()
            with pytest.raises(yr.Mismatch, match=pattern.format(me=me, peer=peer)):
                fault(yard, rows, me, peer)
            named.append((fault.__name__, me))
            assert time.monotonic() - started < 10
            one_exchange(yard, rows)
    return named


def views(rank, world, faults):
    """Different worlds: found through the store before any group is made; (fault, guilty rank) of those that were named."""
    named = []
    rng = np.random.default_rng(1)
    halves = [dist.new_group(list(range(world // 2))), dist.new_group(list(range(world // 2, world)))]
    for i in range(faults):
        me = int(rng.integers(world))
        guilty = rank == me
        cluster, kind = cluster_of(2, world // 2), i % 5
        options = {"cluster": cluster, "scheduler": "fast", "timeout": 20}
        if kind == 0 and guilty:
            options["scheduler"] = "rails"
        if kind == 1 and guilty:
            options["cluster"] = cluster_of(1, world)
        if kind == 2 and guilty:
            options["planner"] = "quota"
        if kind == 3 and guilty:
            options["where"] = halves[me // (world // 2)]
        if kind == 4:
            options["timeout"] = 1.0
        if kind == 4 and guilty:
            yards._count += 1  # this rank makes no yard
        else:
            with pytest.raises(yr.Mismatch, match=r"rank \d+ and rank \d+") as caught:
                yr.Yard(**options)
            assert re.search(rf"rank {me}\b", str(caught.value)), str(caught.value)
            named.append((kind, me))
        dist.barrier()
    return named


def death(rank, world, number):
    """A rank dies or hangs in the middle; returns what this rank raised and after how long."""
    victim = (number * 5 + 1) % world
    kind = ("before the call", "at a send", "in the way back", "hangs", "raises")[number % 5]
    timeout = 5.0
    state = {"sends": 0, "armed": False}

    def observer(*_):
        state["sends"] += 1
        if state["armed"] and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    scheduler = ("fast", "shunt", "direct", "rails")[number % 4]
    yard = yr.Yard(cluster=cluster_of(2, world // 2), scheduler=scheduler, timeout=timeout, observer=observer)
    rows = traffics(world, number)["dense"] + 1
    one_exchange(yard, rows)
    sent, received = rows[rank].tolist(), rows[:, rank].tolist()
    source = torch.zeros(sum(sent), 4, requires_grad=True)
    output = torch.empty(sum(received), 4)
    started = time.monotonic()
    try:
        if kind == "before the call" and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hangs" and rank == victim:
            time.sleep(timeout + 6)
            return victim, kind, None, 0.0
        if kind == "raises" and rank == victim:
            os._exit(1)
        state["armed"] = kind == "at a send"
        result = yr.all_to_all_single(output, source, received, sent, yard)
        state["armed"] = kind == "in the way back"
        result.sum().backward()
        one_exchange_again(yard, output, source, received, sent)
    except yr.RankLost as error:
        seconds = time.monotonic() - started
        with pytest.raises(yr.RankLost, match="of no use"):
            yr.all_to_all_single(output.detach(), source.detach(), received, sent, yard)
        yard.close()  # must not hang either
        return victim, kind, str(error), seconds
    return victim, kind, None, time.monotonic() - started


def one_exchange_again(yard, output, source, received, sent):
    """A rank whose own part was done before the death meets it in the next call."""
    yr.all_to_all_single(output.detach(), source.detach(), received, sent, yard)


def dead_rails(rank, world):
    """mark_dead between steps: exact before and after, and no send on a dead rail. [(src, dst, rail)] of all sends."""
    sends = []
    cluster = cluster_of(2, world // 2)
    found = []
    per = world // 2
    with yr.Yard(
        cluster=cluster,
        scheduler="auto",
        timeout=30,
        observer=lambda s, a, b, n, rail: sends.append((a, b, rail)),
    ) as yard:
        for scheduler in ("auto", "fast", "rails", "direct", "shunt", "ecmp"):
            yard.choose(scheduler=scheduler)
            yard.set_cluster(cluster)
            rows = traffics(world, 3)["dense"] + 2
            one_exchange(yard, rows)
            sends.clear()
            yard.mark_dead(0, 1)
            one_exchange(yard, rows)
            found.append((scheduler, "one", [(0, 1)], list(sends)))
            sends.clear()
            if per > 2:
                yard.mark_dead(1, 0)
                one_exchange(yard, rows)
                found.append((scheduler, "two", [(0, 1), (1, 0)], list(sends)))
                sends.clear()
    return found
