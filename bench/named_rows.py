"""Rows and experts that carry their names: a stale copy, or a row that is another's, cannot look right."""

from __future__ import annotations

import torch

import moeyard.runtime as yr
from bench.replica_training import REPLICAS, TOKENS, Turning, experts_of

CYCLE = 100  # what an expert's version is counted up to: exact in bf16
RANK, TOKEN, STEP, EXPERT, VERSION, WIDTH = range(6)


class Named(torch.nn.Module):
    """Expert e adds its number and its version to a row that says whose it is and when it was sent."""

    def __init__(self, yard, home_E, first):
        super().__init__()
        self.yard, self.home_E, self.router = yard, home_E, Turning(first, len(home_E))
        own = [e for e, home in enumerate(home_E) if home == yard.rank]
        self.own = torch.tensor(own, device=yard.device)
        self.names = torch.nn.Parameter(torch.zeros(len(own), 1, WIDTH, device=yard.device))
        with torch.no_grad():
            self.names[:, 0, EXPERT] = self.own.float()

    def forward(self, x):
        index = self.router.chosen(len(x), x.device).unsqueeze(1)
        rows, route = yr.dispatch(x, index, self.yard, len(self.home_E), home_E=self.home_E, trains=True)
        (names,), hosted = yr.gather_experts(self.yard, route.placement, [self.names], x.dtype)
        ones = rows.new_ones(len(rows), 1)
        again = None if hosted is None else lambda: hosted.again()
        counts = route.counts
        added = yr.grouped_linear(ones, route.ends, names, transposed=True, counts=counts, again=again)
        return yr.combine(rows + added, route, None), rows, route


def wrong_rows(yard, steps, layers=2):
    """(rows and experts looked at, what was wrong with the first that was). Fused SGD counts the versions up."""
    yard.choose(**REPLICAS)
    experts = experts_of(yard.size)
    home_E = torch.arange(experts).numpy() * yard.size // experts
    stack = torch.nn.ModuleList(Named(yard, home_E, i) for i in range(layers))
    optimizer = torch.optim.SGD(stack.parameters(), lr=1.0, fused=True)
    looked = 0
    for step in range(steps):
        outs = []
        with torch.autocast(yard.device.type, torch.bfloat16):
            for layer in stack:
                layer.router.step = step
                outs.append(layer(names_of(yard, step).bfloat16().requires_grad_()))
        sum(out.float().sum() for out, _, _ in outs).backward()
        for layer, (out, rows, route) in zip(stack, outs, strict=True):
            flaw = flaw_of(yard, layer, step, out, rows, route)
            if flaw:
                return looked, f"step {step}: {flaw}"
            looked += len(out) + len(rows) + len(layer.own)
            version = step % CYCLE
            layer.names.grad.zero_()
            layer.names.grad[:, 0, VERSION] = -1.0 if version + 1 < CYCLE else float(version)
        optimizer.step()
        optimizer.zero_grad()
    return looked, ""


def names_of(yard, step):
    x = torch.zeros(TOKENS, WIDTH, device=yard.device)
    x[:, RANK], x[:, TOKEN], x[:, STEP] = yard.rank, torch.arange(TOKENS, device=yard.device), step % CYCLE
    return x


def flaw_of(yard, layer, step, out, rows, route):
    """What one step of one layer got wrong, or nothing."""
    chosen = layer.router.chosen(TOKENS, yard.device)
    wanted = names_of(yard, step)
    wanted[:, EXPERT], wanted[:, VERSION] = chosen, step % CYCLE
    if not torch.equal(out.float(), wanted):
        return "a token came back with another's row, or from another or an old expert"
    if not bool((rows[:, STEP] == step % CYCLE).all()):
        return "an expert got a row of another step"
    counts = torch.tensor(route.counts, device=yard.device)
    expert = torch.repeat_interleave(torch.tensor(route.experts, device=yard.device), counts)
    if not torch.equal(chosen[rows[:, TOKEN].long()], expert):
        return "an expert got a row that did not choose it"
    rows_E = torch.as_tensor(route.demand.rows.sum(axis=0), device=yard.device)[layer.own]
    if not torch.equal(layer.names.grad[:, 0, VERSION], rows_E.float()):
        return "the gradient at home is not that of all rows"
    return ""
