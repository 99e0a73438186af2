"""A trace of some ranks on a cluster of others."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import IntArray
from moeyard.errors import InvalidDemand
from moeyard.trace import Trace

_DITHER = 0.6180339887498949  # of C: experts round at different ranks, evenly spread


def fold(trace: Trace, ranks: int, *, rows_per_rank: float | None = None) -> Trace:
    """The same routing on so many ranks. meta["folded"] says how.

    The trace's ranks lie side by side, each as wide as the next, and the line is cut into `ranks` equal pieces: R ranks on R / k
    are sums of k neighbours, on k R each is divided by k. Every expert's rows in a record and layer stay what they were, to the
    row. A trace of one rank, which says nothing of ranks, is so spread evenly. `rows_per_rank`: then all counts are scaled to
    this mean of a record and layer, in whole rows: a rank keeps its total, an expert gets less than a row more or less than its share.
    """
    if ranks < 1:
        raise InvalidDemand(f"cannot fold a trace onto {ranks} ranks; give at least one")
    said = []
    counts: IntArray = trace.counts.astype(np.int64)
    old = trace.num_ranks
    if old != ranks:
        counts = _cut(counts, ranks)
        said.append(_how(old, ranks))
    if rows_per_rank is not None:
        counts, factor = _scaled(counts, rows_per_rank)
        said.append(f"all counts x {factor:.4g}, to {rows_per_rank:g} rows per rank and layer")
    if not said:
        return trace
    return Trace(counts, trace.steps, dict(trace.meta) | {"folded": "; ".join(said)})


def _how(old: int, new: int) -> str:
    if old == 1:
        return f"loads of all ranks, spread evenly over {new}"
    if old % new == 0:
        return f"{old} ranks on {new}: every {old // new} neighbours are one"
    if new % old == 0:
        return f"{old} ranks on {new}: each is divided by {new // old}"
    return f"{old} ranks on {new}: side by side, cut into {new} equal pieces"


def _cut(counts: IntArray, ranks: int) -> IntArray:
    """Rows up to each cut, rounded down in whole numbers, and their differences."""
    records, layers, old, experts = counts.shape
    before = np.zeros((records, layers, old + 1, experts), dtype=np.int64)
    np.cumsum(counts, axis=2, out=before[:, :, 1:])
    at, part = np.divmod(np.arange(ranks + 1) * old, ranks)
    # Every expert starts rounding elsewhere: otherwise the first pieces would miss what the last ones get.
    shift = (np.arange(experts) * int(ranks * _DITHER + 1)) % ranks
    inside = counts[:, :, np.minimum(at, old - 1), :]
    # (whole * ranks + rest) // ranks, without the product that could overflow
    upto = before[:, :, at, :] + (inside % ranks * part[:, None] + shift) // ranks
    upto += inside // ranks * part[:, None]
    pieces: IntArray = np.diff(upto, axis=2)
    return pieces


def _scaled(counts: IntArray, rows_per_rank: float) -> tuple[IntArray, float]:
    if not (np.isfinite(rows_per_rank) and 0 < rows_per_rank < 2**40):
        raise InvalidDemand(f"rows per rank must be positive and below 2**40, got {rows_per_rank!r}")
    mean = float(counts.sum(dtype=np.float64)) / (counts.shape[0] * counts.shape[1] * counts.shape[2])
    if mean == 0:
        raise InvalidDemand("the trace has no rows at all; there is nothing to scale")
    factor = rows_per_rank / mean
    if factor == 1:
        return counts, factor
    own = counts.sum(axis=3)
    upto = np.floor(np.cumsum(own * factor, axis=2) + 0.5)
    total = np.diff(upto, axis=2, prepend=0.0)
    # Every rank starts rounding elsewhere: otherwise all would round down the same rare experts.
    shift = (np.arange(counts.shape[2]) * _DITHER % 1)[:, None]
    ratio = np.divide(total, own, out=np.zeros_like(total), where=own > 0)
    before = np.floor(np.cumsum(counts, axis=3) * ratio[..., None] + shift)
    before[..., -1] = total
    rows: IntArray = np.diff(before, axis=3, prepend=0.0).astype(np.int64)
    return rows, factor
