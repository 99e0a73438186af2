"""What the ranks do in test_replicas.py."""

from __future__ import annotations

import torch
from bench import replica_training as training
from bench.named_rows import wrong_rows
from bench.replica_training import Case, compare

import moeyard.runtime as yr


def prepare():
    training.prepare(2)


def everything(rank, world, cases, steps, named_steps, kinds, parts):
    """Those of the below that are in `parts`, from one start."""
    every = {
        "alike": lambda: alike(rank, world, cases, steps),
        "named": lambda: named(rank, world, named_steps),
        "checks": lambda: checks(rank, world),
        "stale": lambda: stale(rank, world),
        "precision": lambda: precision(rank, world, kinds),
    }
    return {name: part() for name, part in every.items() if name in parts}


def yard_of(world, **options):
    return yr.Yard(cluster=training.cluster_of(world), scheduler="direct", timeout=30, **options)


def alike(rank, world, cases, steps):
    """A row for each case, as the bench makes it."""
    with yard_of(world, checked=True) as yard:
        return list(compare(yard, [Case(*case) for case in cases], steps))


def named(rank, world, steps):
    with yard_of(world, checked=True) as yard:
        return wrong_rows(yard, steps)


def layer_of(yard, dtype=None, **options):
    router = training.Turning(0, training.experts_of(yard.size))
    sizes = (training.HIDDEN, training.HIDDEN, training.experts_of(yard.size), 1)
    return yr.MoELayer(*sizes, yard, router=router, dtype=dtype, **options)


def rows_of(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(training.TOKENS, training.HIDDEN, generator=generator).to(dtype).requires_grad_()


def said(call):
    """What was refused, or what came out."""
    try:
        return call()
    except yr.Mismatch as error:
        return str(error)


def checks(rank, world):
    """What check_replicas says at each point of a step, and of what is wrong on purpose."""
    with yard_of(world, **training.REPLICAS) as yard:
        layer, found = layer_of(yard), {}
        found["before"] = said(yard.check_replicas)
        loss = layer(rows_of(rank)).sum()
        found["in use"] = said(yard.check_replicas)
        before = layer.down.detach().clone()
        with torch.no_grad():
            layer.down[0] *= 2  # on every rank its first expert: 0 and 2
        found["old"] = said(yard.check_replicas)
        with torch.no_grad():
            layer.down.copy_(before)
        (held,) = yard.workspace.held.values()
        replica = held.weights[0][0 if rank == 1 else 1]  # on rank 1 expert 0, away from home
        flipped = replica.view(torch.int32)[0, :1]
        flipped ^= rank  # one bit, on rank 1 alone
        found["one bit"] = said(yard.check_replicas)
        flipped ^= rank
        found["mended"] = said(yard.check_replicas)
        loss.backward()
        found["after"] = said(yard.check_replicas)
        with torch.no_grad():
            layer(rows_of(rank))
        found["without gradients"] = said(yard.check_replicas)
        layer(rows_of(rank))
        held, yard.workspace.held = yard.workspace.held, yard.workspace.held if rank == 0 else {}
        found["one rank alone"] = said(yard.check_replicas)
        yard.workspace.held = held
        layer.requires_grad_(rank == 0)
        found["frozen on one rank"] = said(lambda: layer(rows_of(rank)))
        layer.requires_grad_(False)
        x = rows_of(rank)
        layer(x).sum().backward()
        found["frozen"] = bool(x.grad.abs().sum() > 0)
        return found


def stale(rank, world):
    """A gather that is left out is noticed before its copies are used."""
    with yard_of(world, checked=True, **training.REPLICAS) as yard:
        layer = layer_of(yard)
        layer(rows_of(rank)).sum().backward()
        hosted = []
        took = yr.layers.replicas.Hosted._fill

        def once(self, carry, source):
            if not hosted:
                took(self, carry, source)
                hosted.append(self)

        yr.layers.replicas.Hosted._fill = once
        try:
            layer(rows_of(rank)).sum().backward()
            with torch.no_grad():
                layer.gate_up.mul_(1.5)
            return said(lambda: layer(rows_of(rank)))
        finally:
            yr.layers.replicas.Hosted._fill = took


class Noted:
    """A transport that notes the dtypes of what it carries."""

    def __init__(self, transport):
        self.transport, self.dtypes = transport, set()

    def exchange(self, plan, backward, output, source, agreed=False):
        self.dtypes.add(str(source.dtype))
        self.transport.exchange(plan, backward, output, source, agreed)

    def __getattr__(self, name):
        return getattr(self.transport, name)


def precision(rank, world, kinds):
    """For each (activations, masters, autocast): what travels, what computes, what comes out."""
    found = []
    with yard_of(world, **training.REPLICAS) as yard:
        for activations, masters, autocast in kinds:
            layer = layer_of(yard, getattr(torch, masters))
            noted = yard.transport = Noted(yard.transport)
            grouped, loops = Counted(torch.nn.functional, "grouped_mm"), Counted(torch, "mm")
            x = rows_of(rank, getattr(torch, activations))
            with grouped, loops:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = layer(x)
                y.float().square().sum().backward()
            yard.transport = noted.transport
            grad = layer.gate_up.grad
            found.append(
                {
                    "travels": noted.dtypes,
                    "computes": grouped.dtypes,
                    "loops": loops.dtypes,
                    "result": str(y.dtype),
                    "gradients": {str(x.grad.dtype), str(grad.dtype), str(layer.down.grad.dtype)},
                    # Expert 0 has a replica: its gradient is a sum, and was not rounded to bf16 afterwards.
                    "rounded": bool((grad == grad.bfloat16().to(grad.dtype)).all()),
                }
            )
    return found


class Counted:
    """Calls of a function of a module while inside, and their first argument's dtypes; none of one that this torch has not."""

    def __init__(self, module, name):
        self.module, self.name, self.dtypes = module, name, set()

    def __enter__(self):
        self.real = getattr(self.module, self.name, None)
        if self.real is None:
            return

        def call(first, *arguments, **named):
            self.dtypes.add(str(first.dtype))
            return self.real(first, *arguments, **named)

        setattr(self.module, self.name, call)

    def __exit__(self, *_):
        if self.real is not None:
            setattr(self.module, self.name, self.real)
