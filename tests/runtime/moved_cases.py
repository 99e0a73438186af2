"""Loops that hold more than a model and its optimizer, while homes move or a rank overflows: what the ranks do in test_moved.py."""

from __future__ import annotations

import copy
import tempfile
import warnings

import numpy as np
import torch
import torch.distributed as dist
from bench import replica_training as training
from compose_cases import kind
from harness import EVERY
from torch.distributed.device_mesh import init_device_mesh

import moeyard.runtime as yr
from moeyard.errors import MoeyardError

HIDDEN, EXPERTS, STEPS, LONG = 8, 8, 6, 10**9
OTHER = np.array([0, 1] * 4)  # each rank has as many as before
UNEVEN = np.array([0, 0, 0, 0, 0, 0, 1, 1])


class Heavy(torch.nn.Module):
    """Three quarters of the rows to the experts that the first rank has, which are others in every expert-parallel group."""

    def __init__(self, group, first=0):
        super().__init__()
        self.group, self.first = group, first
        self.weight = torch.nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64, device=kind()))

    def forward(self, x):
        place = torch.arange(len(x), device=x.device) % 8
        index = torch.where(place < 6, (self.group + place) % 4, 4 + place % 4)
        index = ((index + self.first) % EXPERTS).unsqueeze(1)
        weight = self.weight.expand(len(x), 1)
        return yr.RouterState(weight, index, weight)


def prepare():
    training.prepare(2)


def everything(rank, world, cases=EVERY):
    """{case: what it gave} of `cases`, on two groups of two ranks."""
    mesh = init_device_mesh(kind(), (2, world // 2), mesh_dim_names=("dp", "ep"))
    found = {}
    with yr.Yard(mesh, scheduler="direct", timeout=60, planner="quota", slots=1, policy="quota") as yard:
        still = _losses(yard, rank, lambda *_: 0)
        for case in (by_themselves, together, two_optimizers, kept_loss, shared):
            if case.__name__ in cases:
                found[case.__name__] = case(yard, rank, still)
        for case in (cloned, left_behind, rolled_back, beside, second, overflowed):
            if case.__name__ in cases:
                found[case.__name__] = case(yard, rank)
        if "elsewhere" in cases:
            with yr.Yard(scheduler="direct", timeout=60) as wide:
                found["elsewhere"] = elsewhere(yard, wide, rank)
    dist.barrier()
    return found


def by_themselves(yard, rank, still):
    """Groups have other counts and must come to the same homes."""
    moved = []

    def change(model, optimizers, step):
        moved.append(yr.rehome(model, yard, optimizers[0], steps=LONG))

    return {"losses": [still, _losses(yard, rank, change)], "moved": sum(moved)}


def together(yard, rank, still):
    """The average of the weights moves along: its losses, too, are those of experts that stay."""
    found = []
    for homes in (None, OTHER):
        averages = []

        def change(model, optimizers, step, homes=homes, averages=averages):
            if not averages:
                averages.append(copy.deepcopy(model))
            if homes is not None and step == 2:
                yr.rehome(model, yard, optimizers[0], steps=LONG, copies=[torch.nn.ModuleList(averages)])
            with torch.no_grad():
                for mean, one in zip(averages[0].parameters(), model.parameters(), strict=True):
                    mean.lerp_(one, 0.5)

        _losses(yard, rank, change)
        found.append([_loss(averages[0], _rows(rank, 9)).item()])
    return {"losses": found, "moved": int((averages[0][0].home_E != np.arange(EXPERTS) // 4).sum())}


def two_optimizers(yard, rank, still):
    """The dense part has one, the experts another."""
    refused, moved = [], []

    def change(model, optimizers, step):
        if step == 2:
            try:
                yr.move_experts(model, yard, OTHER, optimizers[1])
            except MoeyardError as error:
                refused.append(str(error))
            moved.append(yr.move_experts(model, yard, OTHER, [*optimizers, optimizers[0]]))

    ways = [_losses(yard, rank, one, apart=True) for one in (lambda *_: 0, change)]
    return {"losses": ways, "moved": sum(moved), "refused": refused[0]}


def kept_loss(yard, rank, still):
    """Ranks have more experts, or fewer, while the graph of the last step is alive."""

    moved = []

    def change(model, optimizers, step):
        if step in (1, 3):
            homes = UNEVEN if step == 1 else np.arange(EXPERTS) // 4
            moved.append(yr.move_experts(model, yard, homes, optimizers[0]))

    return {"losses": [still, _losses(yard, rank, change)], "moved": sum(moved)}


def shared(yard, rank, still):
    """Two layers with the same experts, and other hot ones."""
    moved = []

    def change(model, optimizers, step):
        moved.append(yr.rehome(model, yard, optimizers[0], steps=LONG))

    ways = [_losses(yard, rank, one, same=True) for one in (lambda *_: 0, change)]
    try:
        yr.move_experts(_model(yard, rank, same=True), yard, {"0": OTHER})
    except MoeyardError as error:
        refused = str(error)
    return {"losses": ways, "moved": sum(moved), "refused": refused}


def cloned(yard, rank):
    """Layers that were copied from one another are layers of their own: where each moves to, and what is said of the first."""
    found = []
    for clone in (False, True):
        model = _model(yard, rank)
        model[1].router.first = 4
        if clone:
            first = model[0]
            model = torch.nn.ModuleList(copy.deepcopy(first) for _ in range(2))
            model[1].router.first = 4
        for step in range(3):
            _loss(model, _rows(rank, step))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yr.rehome(model, yard, steps=LONG)
        found.append(([one.home_E.tolist() for one in model], [str(one.message) for one in heard]))
    return found


def left_behind(yard, rank):
    """A copy that is not moved is told of; one that is, or is gone, is not."""
    model = _model(yard, rank)
    said = []
    for homes, kept in ((OTHER, True), (np.arange(EXPERTS) // 4, False)):
        beside = copy.deepcopy(model) if kept else None
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yr.move_experts(model, yard, homes)
        said.append([str(one.message) for one in heard])
        del beside
    return said


def rolled_back(yard, rank):
    model = _model(yard, rank)
    kept, before = copy.deepcopy(model.state_dict()), _loss(model, _rows(rank, 0)).item()
    yr.move_experts(model, yard, OTHER)
    try:
        model.load_state_dict(kept)
    except MoeyardError as error:
        refused = str(error)
    model.load_state_dict({name: one for name, one in kept.items() if "router" in name}, strict=False)
    routers = copy.deepcopy(kept)
    for name in [name for name in kept if "router" not in name]:
        del routers[name]
    model.load_state_dict(routers, strict=False)  # says where experts lived, and has none
    yr.move_experts(model, yard, np.arange(EXPERTS) // 4)
    with torch.no_grad():
        model[0].down.zero_()
    model.load_state_dict(kept)
    return {"refused": refused, "losses": [before, _loss(model, _rows(rank, 0)).item()]}


def beside(yard, rank):
    """A copy of the model beside it in a checkpoint."""
    model = _model(yard, rank)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    said = []
    for given, ranks in (("extra", range(4)), ("per_rank", range(4)), ("extra", [0])):
        average = {
            "average": copy.deepcopy(model)
        }  # on all ranks: a copy is a layer of its own, with a number
        try:
            yr.save_checkpoint(
                folder[0], model, None, yard, step=1, **{given: average if rank in ranks else {}}
            )
        except MoeyardError as error:
            said.append(str(error))
    return said


def second(yard, rank):
    """A second derivative through matrices that are read again."""
    ends = torch.tensor([2, 4], dtype=torch.int32, device=kind())
    rows, weight = (
        torch.randn(*shape, device=kind(), requires_grad=True) for shape in ((4, HIDDEN), (2, HIDDEN, HIDDEN))
    )
    out = yr.grouped_linear(rows, ends, weight, again=lambda: (weight.detach(),))
    try:
        torch.autograd.grad(torch.tanh(out).sum(), rows, create_graph=True)
    except MoeyardError as error:
        return str(error)
    return "nothing"


def overflowed(yard, rank):
    """One rank's experts have an infinite gradient: the scale of the next step, and whether weights stayed, beside a step without."""
    found = []
    unused = torch.amp.GradScaler(kind(), enabled=False)
    yr.unscale_gradients(unused, torch.optim.SGD(_model(yard, rank).parameters(), lr=0.1), yard)
    for bad in (False, True):
        model = _model(yard, rank)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(kind(), 2.0)
        before = model[0].router.weight.detach().clone()
        scaler.scale(_loss(model, _rows(rank, 0))).backward()
        yr.sync_gradients(model, yard)
        if bad and rank == 1:
            model[0].down.grad[0, 0, 0] = torch.inf
        yr.unscale_gradients(scaler, optimizer, yard)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), bool((model[0].router.weight == before).all())))
    return found


def elsewhere(yard, wide, rank):
    """Layers of two yards of different ranks."""
    model = torch.nn.ModuleList([_model(yard, rank)[0], _model(wide, rank)[0]])
    _loss(model, _rows(rank, 0)).backward()
    said = []
    for call in (
        lambda: yr.sync_gradients(model, yard),
        lambda: yr.clip_grad_norm_(model, 1.0, yard),
        lambda: yr.move_experts(model, yard, OTHER),
    ):
        try:
            call()
        except MoeyardError as error:
            said.append(str(error))
    return said


def _model(yard, rank, *, same=False):
    layers = torch.nn.ModuleList(
        yr.MoELayer(HIDDEN, HIDDEN, EXPERTS, 1, yard, router=Heavy(rank // 2, i), seed=i, dtype=torch.float64)
        for i in range(2)
    )
    if same:
        layers[1].gate_up, layers[1].down = layers[0].gate_up, layers[0].down
    return layers


def _rows(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(32, HIDDEN, dtype=torch.float64, generator=generator).to(kind())


def _loss(model, x):
    for layer in model:
        x = x + layer(x)
    return (x**2).mean()


def _losses(yard, rank, change, *, same=False, apart=False):
    """Of training in which `change(model, optimizers, step)` comes between two steps. The last graph is alive then."""
    model = _model(yard, rank, same=same)
    dense = [one for name, one in model.named_parameters() if "router" in name]
    experts = [one for name, one in model.named_parameters() if "router" not in name]
    optimizers = [
        torch.optim.SGD(experts if apart else experts + dense, lr=0.05, momentum=0.9),
        *([torch.optim.AdamW(dense, lr=0.01)] if apart else []),
    ]
    found = []
    for step in range(STEPS):
        loss = _loss(model, _rows(rank, step))
        loss.backward()
        yr.sync_gradients(model, yard)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        change(model, optimizers, step)
        found.append(loss.item())
    return found
