"""When a layer begins its plans, in test_ahead.py."""

from __future__ import annotations

import oracle
import torch
from ahead_models import EXPERTS, models, rows

import moeyard.runtime as yr
from moeyard.runtime.layers import ahead

WAYS = ({"chunks": 1}, {"chunks": 2}, {"dedup": True}, {"dedup": True, "chunks": 2})


def planned_behind(yard, rank):
    """What is still to be planned after a forward, if nobody asks for it; in each way in which rows go."""
    found = []
    for way in WAYS:
        yard.choose(**{"chunks": 1, "dedup": False} | way)
        _, ours = models(yard, 2)
        x, _ = oracle.shares(yard.size, 6)[rank]
        with torch.no_grad():
            ours(x)
        found.append(len(yard.forecasts._seen))
    yard.choose(chunks=1, dedup=False)
    layer = ours.layers[0]
    known = ahead.Layer(layer.site, "by hand", [layer.gate_up, layer.down], layer.down.dtype)
    tokens, chosen_TK = rows(rank), torch.arange(len(rows(rank)))[:, None] % EXPERTS
    there, route = yr.dispatch(tokens, chosen_TK, yard, EXPERTS, layer=known)
    yr.combine(there, route, None)
    return [*found, len(yard.forecasts._seen)]
