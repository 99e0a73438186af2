"""What a gather reads while it is written: a case of fresh_cases.py."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from unittest import mock

import torch

from moeyard.runtime.layers.replicas import Hosted


def read_meanwhile(layers, x, yard):
    """Other weights are in the second layer when the gather that was begun in the first one's call reads them, or when it sends what it has
    read, and its own again when it is called. Jobs behind wait at a gate, so that it is so every time."""
    found = [_disturbed(layers, x, yard, before_it_sends, 1.5) for before_it_sends in (True, False) * 2]
    return [loss for loss, _ in found] + [yard.options.planner == "static" or found[-1][1]]


def sent_meanwhile(layers, x, yard, times=1.5):
    """The same, all of them when it sends."""
    found = [_disturbed(layers, x, yard, True, times) for _ in range(3)]
    return [loss for loss, _ in found] + [found[-1][1]]


def _disturbed(layers, x, yard, before_it_sends, times):
    """The loss, and whether a gather was begun ahead."""
    first, second, _ = layers
    with _held_up(second.site, before_it_sends) as (gate, held):
        made = first(x)
        for hosted in held if before_it_sends else ():
            hosted._taken.wait()
        kept = [p.detach().clone() for p in second.parameters()]
        with torch.no_grad():
            for p in second.parameters():
                p.mul_(times)
            gate.set()
            if held:
                yard.behind.submit(lambda carry: None).wait()  # jobs are done in turn
            for p, old in zip(second.parameters(), kept, strict=True):
                p.copy_(old)
    return (second(made) ** 2).mean().item(), len(held) == 1


@contextmanager
def _held_up(site, before_it_sends):
    """A gate at which the gathers of a layer wait before they read, or before they send; and those that came to it."""
    begin, fill, gate, held = Hosted.begin, Hosted._fill, threading.Event(), []

    def late(hosted):
        if hosted.site == site:
            held.append(hosted)
            if not before_it_sends:
                hosted.yard.behind.submit(lambda carry: gate.wait(30))
        begin(hosted)

    def later(hosted, carry, source):
        if hosted.site == site and before_it_sends:
            gate.wait(30)
        fill(hosted, carry, source)

    with mock.patch.object(Hosted, "begin", late), mock.patch.object(Hosted, "_fill", later):
        try:
            yield gate, held
        finally:
            gate.set()
