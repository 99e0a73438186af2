"""Loops that a hostile reader thought of: cases of fresh_cases.py, each as (layers, x, yard) -> numbers."""

from __future__ import annotations

import contextlib
import gc
import itertools
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from bench import replica_training as training
from bench.replica_training import HIDDEN, NONE, REPLICAS, Turning
from torch.utils.checkpoint import checkpoint

import moeyard as my
import moeyard.runtime as yr
from moeyard.runtime.agree import ahead

EXPERTS = 4


def prepare():
    training.prepare(4)


def put_back_elsewhere(layers, x, yard):
    """Other weights in by `.data`, for an evaluation between a forward and its backward, and the first ones back in other memory."""
    found = []
    for evaluated, again in ((True, None), (False, False)):
        for _ in range(2):
            loss = _loss(layers, x.clone().requires_grad_(), again)
            kept = [p.data.clone() for p in layers.parameters()]
            for p in layers.parameters():
                p.data.mul_(1.7)
            if evaluated:
                with torch.no_grad():
                    found.append(_loss(layers, x).item())
            for p, old in zip(layers.parameters(), kept, strict=True):
                p.data = old
            loss.backward()
            found += [loss.item(), *_norms(layers)]
            layers.zero_grad()
    return found


def moved_between(layers, x, yard):
    """A forward inside a backward pass, with counts that were last seen before homes moved."""
    found = []

    def evaluate(_=None):
        _turn(layers, 3)
        with torch.no_grad():
            found.append(_loss(layers, 2 * x).item())
        _turn(layers, 0)

    evaluate()
    evaluate()
    yr.move_experts(layers, yard, np.array([1, 0, 1, 0]))
    loss = _loss(layers, x)
    loss.register_hook(evaluate)
    loss.backward()
    return found


class _Given(torch.nn.Module):
    """Chooses what it is told."""

    index = (0, 0)

    def forward(self, x):
        weights = torch.ones(len(x), 1, dtype=x.dtype)
        return yr.RouterState(weights, torch.tensor(self.index).unsqueeze(1), weights)


def many_between(layers, x, yard):
    """A checkpointed forward, more other counts of its layer than are kept, its backward."""
    rank, found = dist.get_rank(), []
    chosen = list(itertools.combinations_with_replacement(range(EXPERTS), 2))
    layer = yr.MoELayer(HIDDEN, HIDDEN, EXPERTS, 1, yard, router=_Given(), seed=5, dtype=torch.float64)

    def run(given, index):
        layer.router.index = index
        return _loss([layer], given)

    with mock.patch.object(ahead, "REPLAYS", 4):
        for mine, before in (
            (((0, 1), (1, 2)), ((2, 2), (2, 3))),
            (((0, 0), (1, 2)), ((1, 1), (0, 3))),
            (((0, 1), (0, 1)), ((2, 3), (2, 3))),
            (((1, 1), (0, 3)), ((0, 0), (1, 2))),
            (((0, 2), (0, 0)), ((1, 3), (1, 1))),
        ):
            with torch.no_grad():
                run(x[:2], before[rank])
            loss = checkpoint(run, x[:2].clone().requires_grad_(), mine[rank], use_reentrant=False)
            with torch.no_grad():
                others = [one for one in itertools.product(chosen, chosen) if one != mine][::11]
                found += [run(x[:2], both[rank]).item() for both in others]
            loss.backward()
            found += _norms(layer)
            layer.zero_grad()
    return found


class _Scaled(Turning):
    """Its weights are trained."""

    def __init__(self, index, experts):
        super().__init__(index, experts)
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        state = super().forward(x)
        weights = state.weights * self.scale
        return yr.RouterState(weights, state.index, weights)


def router_alone(layers, x, yard):
    """Nothing but the router is trained, and one rank leaves backward passes out: nobody waits for anybody."""
    layer = yr.MoELayer(
        HIDDEN, HIDDEN, EXPERTS, 1, yard, router=_Scaled(0, EXPERTS), seed=6, dtype=torch.float64
    )
    layer.gate_up.requires_grad_(False)
    layer.down.requires_grad_(False)
    found = []
    for step in range(12):
        layer.router.step = 3 * (step % 3 == 1)
        loss = _loss([layer], x)
        if dist.get_rank() or step % 2:
            loss.backward()
        found.append(loss.item())
    return found


def replaced_by_one(layers, x, yard):
    """One rank puts new Parameters in the place of its own; all make theirs wider; tensors are swapped."""
    found = []
    for step in range(7):
        _turn(layers, step)
        with torch.no_grad():
            found.append(_loss(layers, x).item())
        for layer in layers:
            if step == 1 and dist.get_rank() == 0:
                layer.gate_up = torch.nn.Parameter(layer.gate_up.detach() * 0.5)
            if step == 3:
                gate, down = layer.gate_up.data, layer.down.data
                more = (gate[:, :HIDDEN], gate[:, :3] * 0.3, gate[:, HIDDEN:], gate[:, -3:] * 0.3)
                layer.gate_up.data = torch.cat(more, 1)
                layer.down.data = torch.cat([down, down[:, :, :3] * 0.1], 2)
            if step == 5:
                torch.utils.swap_tensors(layer.down, torch.nn.Parameter(layer.down.detach() * 0.5))
    return found


@contextlib.contextmanager
def _uncollected():
    """What goes round in a circle stays until a rank collects it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collected_by_one(layers, x, yard):
    """A second model is dropped in a circle of references, and one rank alone has collected it."""
    others = _model(yard, 7)
    others.circle = [others]
    found = []
    with _uncollected():
        for step in range(5):
            _turn(layers, step)
            with torch.no_grad():
                found.append(_loss(layers, x).item())
                if others is not None:
                    _turn(others, step)
                    found.append(_loss(others, x).item())
            if step == 2:
                others = None
                if dist.get_rank() == 0:
                    gc.collect()
    return found


def begun_by_one(layers, x, yard):
    """A whole model's forward is begun where the one before was dropped, and one rank alone has collected it."""
    found = []
    with _uncollected():
        for seed in (0, 7):
            model = _model(yard, seed)
            for step in range(4):
                _turn(model, step)
                yr.begin_forward(yard)
                with torch.no_grad():
                    found.append(_loss(model, x).item())
            model.circle = [model]
            model = None
            if dist.get_rank() == 0:
                gc.collect()
    return found


class _Weighed(torch.nn.Module):
    """Chooses what it is told, with weights that are trained."""

    def __init__(self, tokens):
        super().__init__()
        self.index = [[0, 1]] * tokens
        self.weights = torch.nn.Parameter(
            torch.linspace(0.5, 1.5, 2 * tokens, dtype=torch.float64).view(-1, 2)
        )

    def forward(self, x):
        weights = self.weights * 1.0
        return yr.RouterState(weights, torch.tensor(self.index), weights)


def weights_that_cross(rank, world):
    """Rows cross to a node once, their weights with them, and the router alone is trained: without replicas, and with."""
    few, many = [[0, 1]] * 10 + [[1, 5]] * 6, [[6, 7]] * 10 + [[7, 1]] * 6
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    found = []
    with yr.Yard(cluster=training.cluster_of(world), scheduler="direct", timeout=30, dedup=True) as yard:
        for options in (NONE, REPLICAS):
            yard.choose(**options)
            layer = yr.MoELayer(
                HIDDEN, HIDDEN, 8, 2, yard, router=_Weighed(len(x)), seed=3, dtype=torch.float64
            )
            layer.gate_up.requires_grad_(False)
            layer.down.requires_grad_(False)

            def run(given, index, layer=layer):
                layer.router.index = index
                return _loss([layer], given)

            with torch.no_grad():
                for _ in range(4):
                    run(x, few)
            losses = [checkpoint(run, x.clone(), many, use_reentrant=False) for _ in range(6)]
            for loss in losses:
                loss.backward()
            found.append([loss.item() for loss in losses] + _norms(layer))
    return found


def refused_for_one(layers, x, yard):
    """What each rank is told where the weights of one changed between a forward, with another after it, and its backward."""
    first, _ = _loss(layers, x), _loss(layers, 2 * x)
    if dist.get_rank() == 0:
        for p in layers.parameters():
            p.data.mul_(0.5)
    try:
        first.backward()
    except my.MoeyardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def other_receivers(layers, x, yard):
    """With a codec that loses bits: another forward, with other hosts, between a forward and its backward."""
    for _ in range(3):
        _turn(layers, 0)
        one = _loss(layers, x)
        _turn(layers, 3)
        two = _loss(layers, 2 * x)
        two.backward()
        one.backward()
        layers.zero_grad()


def _model(yard, seed):
    return torch.nn.ModuleList(
        yr.MoELayer(
            HIDDEN, HIDDEN, EXPERTS, 1, yard, router=Turning(i, EXPERTS), seed=seed, dtype=torch.float64
        )
        for i in range(2)
    )


def _loss(layers, x, again=None):
    """again: as a checkpoint takes `use_reentrant`."""
    for layer in layers:
        y = layer(x) if again is None else checkpoint(layer, x, use_reentrant=again)
        x = x + 0.3 * torch.tanh(y)
    return ((x - 1) ** 2).mean()


def _norms(module):
    return [0.0 if p.grad is None else float(p.grad.norm()) for p in module.parameters()]


def _turn(layers, step):
    for one in layers.modules():
        if isinstance(one, Turning):
            one.step = step
