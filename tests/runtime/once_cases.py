"""What the ranks do in test_once_ranks.py: tokens that cross to a node once, against one process and against rows each for itself."""

from __future__ import annotations

import copy

import numpy as np
import oracle
import oracle_cases as cases
import torch
import torch.distributed as dist
from exchange_cases import cluster_of
from torch.utils.checkpoint import checkpoint

import moeyard as my
import moeyard.runtime as yr
from moeyard.warm import warm_crossing


def prepare():
    cases.prepare()
    my.schedule(cluster_of(2, 2), warm_crossing(cluster_of(2, 2)))


def quick(rank, world, nodes):
    """What CI runs, in one start."""
    found = {
        name: one(rank, world, nodes)
        for name, one in (("alike", alike), ("few", few), ("chosen", chosen), ("again", again))
    }
    return found | {
        "refused": refused(rank, world, nodes),
        "steps": steps(rank, world, nodes, 1, whole=False),
    }


def steps(rank, world, nodes, layers=2, *, whole=True):
    """{case: largest error against one process}."""
    found = {}
    with yr.Yard(cluster=cluster_of(nodes, world // nodes), timeout=60, dedup=True) as yard:
        plain, ours = cases.models(yard, 17, 6, layers)
        batch = oracle.shares(world, 3)
        for scheduler in ("auto", "direct", "rails", "fast") if whole else ("auto",):
            for replicas in ("none", "quota"):
                cases.configure(yard, scheduler, replicas)
                name = f"{scheduler}, replicas {replicas}"
                found[name] = cases.check(name, cases.one_step(yard, plain, ours, [batch]))
        for replicas in cases.REPLICAS if whole else ():
            cases.configure(yard, "shunt", replicas)
            found[f"replicas {replicas}"] = cases.check(replicas, cases.one_step(yard, plain, ours, [batch]))
        for replicas in ("none", "quota"):
            cases.configure(yard, "auto", replicas)
            two = [oracle.shares(world, 4), oracle.shares(world, 5, zero_rank=0)]
            found[f"accumulation {replicas}"] = cases.check(replicas, cases.one_step(yard, plain, ours, two))
            yard.choose(chunks=2)
            found[f"chunks {replicas}"] = cases.check(replicas, cases.one_step(yard, plain, ours, [batch]))
            yard.choose(chunks=1)
            plain2, ours2 = cases.models(yard, 17, 6, layers, checkpointed=True)
            found[f"checkpoint {replicas}"] = cases.check(
                replicas, cases.one_step(yard, plain2, ours2, [batch])
            )
            for experts, top_k in ((3, 1), (2, 2), (world, 3)) if whole else ((3, 2),):
                few, mine = cases.models(yard, experts, top_k, layers)
                name = f"{experts} experts, top {top_k}, {replicas}"
                found[name] = cases.check(name, cases.one_step(yard, few, mine, [batch]))
        found |= {name: cases.check(name, errors) for name, errors in parts(yard, world).items()}
    return found


def parts(yard, world):
    """Gradients of the rows or of the weights alone; weights of another dtype."""
    cases.configure(yard, "auto", "none")
    layer = yr.MoELayer(8, 6, 12, 4, yard, dtype=torch.float64)
    for one in (layer.gate_up, layer.down):
        one.requires_grad_(False)
    generator = torch.Generator().manual_seed(yard.rank)
    x = torch.randn(9, 8, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(9)])
    weights = torch.rand(9, 4, generator=generator, dtype=torch.float64)
    found = {}
    for name, wants in (
        ("rows alone", (True, False)),
        ("weights alone", (False, True)),
        ("neither", (False, False)),
    ):
        results = []
        for dedup in (False, True):
            yard.choose(dedup=dedup)
            given = [one.clone().requires_grad_(want) for one, want in zip((x, weights), wants, strict=True)]
            y = layer.experts(given[0], index, given[1])
            if any(wants):
                (y**2).sum().backward()
            results.append([y, *(one.grad for one in given if one.grad is not None)])
        found[name] = {str(i): oracle.relative(b, a) for i, (a, b) in enumerate(zip(*results, strict=True))}
    return found


def wires(rank, world, nodes, experts, top_k, tokens):
    """Rows that cross between nodes, by messages: (each for itself, once, what the routes say, bytes of a row each way)."""
    crossed = [0]
    per = world // nodes

    def seen(stage, src, dst, rows, rail):
        if src // per != dst // per:
            crossed[0] += rows

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 64, generator=generator)
    index = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    found = {}
    cluster = cluster_of(nodes, per)
    with yr.Yard(cluster=cluster, timeout=60, observer=seen, scheduler="rails") as yard:
        layer = yr.MoELayer(64, 8, experts, top_k, yard)
        for dedup in (False, True, "auto"):
            yard.choose(dedup=dedup)
            crossed[0] = 0
            with torch.no_grad():
                y = layer.experts(x, index, weights)
            total = torch.tensor([crossed[0]])
            dist.all_reduce(total)
            found[dedup] = int(total), y.clone()
    return {name: rows for name, (rows, _) in found.items()}, [
        oracle.relative(y, found[False][1]) for _, y in found.values()
    ]


def alike(rank, world, nodes):
    """Twice the same, bit by bit, in bfloat16; and near the rows each for itself."""
    torch.manual_seed(5)
    with yr.Yard(cluster=cluster_of(nodes, world // nodes), timeout=60, dedup=True) as yard:
        layer = yr.MoELayer(32, 16, 16, 6, yard, dtype=torch.bfloat16, seed=1)
        x = torch.randn(40, 32, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
        runs = []
        for dedup in (True, True, False):
            yard.choose(dedup=dedup)
            given = x.clone().requires_grad_()
            layer.zero_grad()
            y = layer(given)
            y.float().square().sum().backward()
            runs.append([y, given.grad, layer.gate_up.grad, layer.down.grad, layer.router.weight.grad])
        for a, b in zip(runs[0], runs[1], strict=True):
            assert torch.equal(a, b)
        return [oracle.relative(a.float(), b.float()) for a, b in zip(runs[0], runs[2], strict=True)]


def losses(rank, world, nodes, count):
    """Losses of the same training, rows each for itself and once."""
    found = []
    with yr.Yard(cluster=cluster_of(nodes, world // nodes), timeout=60, planner="quota", slots=1) as yard:
        _, first = cases.models(yard, 17, 6, 2)
        for dedup in (False, True):
            yard.choose(dedup=dedup)
            ours = copy.deepcopy(first)
            optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
            seen = []
            for step in range(count):
                optimizer.zero_grad()
                tokens, targets = oracle.shares(world, 100 + step)[rank]
                labels = int((targets >= 0).sum())
                share = yr.global_mean(oracle.loss_sum(ours(tokens), targets)[0], labels, yard)
                share.backward()
                yr.sync_gradients(ours, yard)
                optimizer.step()
                total = share.detach().clone()
                dist.all_reduce(total)
                seen.append(total.item())
            found.append(seen)
    return found


def chosen(rank, world, nodes):
    """What `auto` takes, by what a nic carries in a second and top-k: whether rows cross once."""
    found = {}
    for rate in (1e8, 50e9):
        out = my.Port(rate, 1e-5)
        with yr.Yard(
            cluster=cluster_of(nodes, world // nodes).but(scale_out=out), timeout=60, dedup="auto"
        ) as yard:
            for top_k in (1, 8):
                torch.manual_seed(rank)
                layer, seen = yr.MoELayer(16, 8, 32, top_k, yard), []
                for _ in range(2):  # the second knows what the first found
                    layer(torch.randn(64, 16))
                    seen.append(yard.plans.latest(1)[0].traffic.fan is not None)
                found[rate, top_k] = seen
    return found


def again(rank, world, nodes):
    """Many tokens, for which it pays, and few, for which it does not, in turn, computed again in the backward pass after the last call:
    (largest error against rows each for itself, which calls crossed once)."""
    results, seen = [], []
    cluster = cluster_of(nodes, world // nodes).but(scale_out=my.Port(1e7, 1e-3))
    with yr.Yard(cluster=cluster, timeout=60) as yard:
        layer = yr.MoELayer(16, 8, 32, 8, yard, dtype=torch.float64, seed=3)
        for dedup, planner, chunks in (
            (False, "static", 1),
            ("auto", "static", "auto"),
            ("auto", "quota", 1),
        ):
            spec = my.ModelSpec(row_bytes=128, expert_bytes=4096, expert_flops=1.0, flops=1e4, layers=1)
            yard.choose(dedup=dedup, planner=planner, slots=1, chunks=chunks, model=spec)
            layer.zero_grad()
            generator, outputs = torch.Generator().manual_seed(rank), []
            for tokens in (64, 2, 64, 2):
                x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
                outputs.append(checkpoint(layer, x.requires_grad_(), use_reentrant=False))
                seen.append(any(one.traffic.fan is not None for one in yard.plans.latest(1)))
            sum((y**2).sum() for y in outputs).backward()
            results.append([*outputs, layer.gate_up.grad, layer.down.grad, layer.router.weight.grad])
    errors = [oracle.relative(b, a) for other in results[1:] for a, b in zip(results[0], other, strict=True)]
    return float(np.max(errors)), seen


def refused(rank, world, nodes):
    """A rank whose weights want gradients when others' do not is told so; so is a choice that is no expert, and one choice more."""
    texts = []
    with yr.Yard(cluster=cluster_of(nodes, world // nodes), timeout=60, dedup=True) as yard:
        layer = yr.MoELayer(8, 6, 8, 3, yard)
        x, index = torch.randn(4, 8), torch.arange(12).view(4, 3) % 8
        weights = torch.rand(4, 3).requires_grad_(rank == 1)
        wrong = index.clone()
        wrong[0, 0] = 8 if rank == 2 else 0
        more = torch.arange(4 * (4 if rank == 2 else 3)).view(4, -1) % 8
        calls = ((x, index, weights), (x, wrong, weights.detach()), (x, more, torch.rand(more.shape)))
        for args in calls:
            try:
                layer.experts(*args)
            except yr.Mismatch as error:
                texts.append(str(error))
    return texts


def few(rank, world, nodes):
    """Ranks without tokens, a rank that nobody wants, all tokens alike."""
    errors = []
    with yr.Yard(cluster=cluster_of(nodes, world // nodes), timeout=60) as yard:
        layer = yr.MoELayer(8, 6, 8, 3, yard, dtype=torch.float64)
        for tokens, choice in ((0 if rank else 5, None), (3, [0, 1, 2]), (0, None)):
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
            index = torch.randint(0, 8, (tokens, 3), generator=generator)
            if choice is not None:
                index[:] = torch.tensor(choice)
            weights = torch.rand(tokens, 3, generator=generator, dtype=torch.float64)
            results = []
            for dedup in (False, True):
                yard.choose(dedup=dedup)
                given = x.clone().requires_grad_()
                y = layer.experts(given, index, weights)
                (y**2).sum().backward()
                results.append((y, given.grad))
            errors += [oracle.relative(b, a) if a.numel() else 0.0 for a, b in zip(*results, strict=True)]
    return float(np.max(errors))
