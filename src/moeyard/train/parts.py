"""Where a rank's iteration goes: every moment belongs to exactly one part, so the parts add up to the iteration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeyard.arrays import FloatArray

PARTS = ("exchange", "wait", "plan", "compute")  # what overlaps counts for the first; compute is what is left

Span = tuple[str, float, float]  # kind, begin, end


def exchange_spans(own: FloatArray, arrived: FloatArray) -> list[Span]:
    """own[exchange, 2]: this rank's begin and end; arrived: when the last rank came. Until then a rank waits, then rows move."""
    spans: list[Span] = []
    for (begin, end), last in zip(own.tolist(), arrived.tolist(), strict=True):
        meet = min(
            max(last, begin), end
        )  # a rank that needs nothing of the last one may be done before it comes
        spans += [("wait", begin, meet), ("exchange", meet, end)]
    return spans


def divide(begin: float, end: float, spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of [begin, end] by part. Spans of a kind that is no part are compute."""
    cut = [(kind, min(max(a, begin), end), min(max(b, begin), end)) for kind, a, b in spans if kind in PARTS]
    edges = sorted({begin, end, *(t for _, a, b in cut for t in (a, b))})
    open_at = {kind: np.zeros(len(edges), np.int64) for kind in PARTS}
    place = {t: i for i, t in enumerate(edges)}
    for kind, a, b in cut:
        if b > a:
            open_at[kind][place[a] : place[b]] += 1
    found = dict.fromkeys(PARTS, 0.0)
    for i in range(len(edges) - 1):
        kind = next((kind for kind in PARTS if open_at[kind][i]), "compute")
        found[kind] += edges[i + 1] - edges[i]
    return found
