"""What a gather reads while it is written: a case of fresh_cases.py."""

from __future__ import annotations

import threading
from unittest import mock

import torch

from moeyard.runtime.layers.replicas import Hosted


def read_meanwhile(layers, x, yard):
    """Other weights are in the second layer when the gather that was begun in the first one's call reads them, and its own again when it
    is called. Jobs behind wait at a gate, so that it is so every time."""
    first, second, _ = layers
    begin, found = Hosted.begin, []
    for _ in range(4):
        gate, held = threading.Event(), []

        def late(hosted, gate=gate, held=held):
            if hosted.site == second.site:
                held.append(yard.behind.submit(lambda carry: gate.wait(30)))
            begin(hosted)

        with mock.patch.object(Hosted, "begin", late):
            made = first(x)
        kept = [p.detach().clone() for p in second.parameters()]
        with torch.no_grad():
            for p in second.parameters():
                p.mul_(1.5)
            gate.set()
            if held:
                yard.behind.submit(lambda carry: None).wait()  # jobs are done in turn
            for p, old in zip(second.parameters(), kept, strict=True):
                p.copy_(old)
        found.append((second(made) ** 2).mean().item())
    return [*found, len(held)] if yard.options.planner != "static" else [*found, 1]
