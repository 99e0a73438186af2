"""Traffic by name, for comparisons: deterministic by seed, given megabytes per rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeyard.arrays import FloatArray, IntArray, is_whole
from moeyard.errors import MoeyardError, UnknownName
from moeyard.traffic import ROW_BYTES, Traffic, whole_row_bytes

# weights[src, dst] from (ranks, parameter, generator)
Weights = Callable[[int, float, np.random.Generator], FloatArray]


def _balanced(ranks: int, _: float, __: np.random.Generator) -> FloatArray:
    return np.ones((ranks, ranks))


def _random(ranks: int, _: float, rng: np.random.Generator) -> FloatArray:
    return rng.random((ranks, ranks))


def _zipf(ranks: int, exponent: float, rng: np.random.Generator) -> FloatArray:
    """Every rank sends k ** -exponent to its k-th destination; who is k-th is random, for each rank anew."""
    order = 1.0 + rng.permuted(np.tile(np.arange(ranks), (ranks, 1)), axis=1)
    weights: FloatArray = order**-exponent
    return weights


def _zipf_pairs(ranks: int, exponent: float, rng: np.random.Generator) -> FloatArray:
    """The k-th largest of all pairs has weight k ** -exponent; which pair is k-th is random. One pair may outweigh a node."""
    order = rng.permutation(ranks * ranks).reshape(ranks, ranks) + 1.0
    weights: FloatArray = np.power(order, -exponent)
    return weights


def _hot(ranks: int, share: float, rng: np.random.Generator) -> FloatArray:
    """Every rank sends `share` of its rows to the one rank with the hot expert, the rest evenly."""
    weights = np.full((ranks, ranks), (1 - share) / ranks)
    weights[:, int(rng.integers(ranks))] += share
    return weights


def _sparse(ranks: int, density: float, rng: np.random.Generator) -> FloatArray:
    """A pair has rows with probability `density`, then a uniform amount; at least one pair has."""
    weights: FloatArray = rng.random((ranks, ranks)) * (rng.random((ranks, ranks)) < density)
    if not weights.any():
        weights[0, -1] = 1.0
    return weights


# name -> (what its parameter means, the default or None if it takes none, weights)
WORKLOADS: dict[str, tuple[str, float | None, Weights]] = {
    "balanced": ("every pair alike", None, _balanced),
    "hot": ("share of rows for one hot expert", 0.25, _hot),
    "random": ("uniform per pair", None, _random),
    "sparse": ("share of pairs with any rows", 0.1, _sparse),
    "zipf": ("exponent over the destinations of a rank", 0.9, _zipf),
    "zipf-pairs": ("exponent over all pairs", 0.9, _zipf_pairs),
}
_MOST_ROWS = 2**40  # per rank: products of rows stay well inside 64 bits
_LARGEST = {"hot": 1.0, "sparse": 1.0}


def workload(spec: str, num_ranks: int, *, mb: float, row_bytes: int = ROW_BYTES, seed: int = 0) -> Traffic:
    """`balanced`, `random`, `zipf:0.9`, `hot:0.25` or `sparse:0.1`: `mb` megabytes per rank on average, in all.

    The rows that a rank keeps to itself count. The total is exact to the row.
    """
    name, colon, text = spec.partition(":")
    if name not in WORKLOADS:
        raise UnknownName.of("workload", name, WORKLOADS)
    meaning, default, weights = WORKLOADS[name]
    parameter = _parameter(name, text, meaning, default) if colon else default or 0.0
    if not (np.isfinite(mb) and mb > 0):
        raise MoeyardError(f"megabytes per rank must be positive and finite, got {mb!r}")
    if not (is_whole(num_ranks) and num_ranks >= 1):
        raise MoeyardError(f"traffic is between a whole number of ranks, at least 1, got {num_ranks!r}")
    if not (is_whole(seed) and seed >= 0):
        raise MoeyardError(f"a seed is a whole number of zero or more, got {seed!r}")
    row_bytes = whole_row_bytes(row_bytes)
    if mb * 1e6 / row_bytes > _MOST_ROWS:
        raise MoeyardError(
            f"{mb} MB per rank is more than 2**40 rows of {row_bytes} bytes; use less or larger rows"
        )
    rows = round(mb * 1e6 / row_bytes)
    if rows < 1:
        raise MoeyardError(
            f"{mb} MB per rank is less than one row of {row_bytes} bytes; use more or smaller rows"
        )
    rng = np.random.default_rng(seed)
    return Traffic(_whole(weights(num_ranks, parameter, rng), rows * num_ranks), row_bytes)


def _parameter(name: str, text: str, meaning: str, default: float | None) -> float:
    if default is None:
        raise MoeyardError(f"workload {name!r} takes no parameter, got {text!r}; write {name}")
    most = _LARGEST.get(name, np.inf)
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not (0 <= value <= most and np.isfinite(value)):
        limits = "of zero or more" if most == np.inf else f"from 0 to {most:g}"
        raise MoeyardError(
            f"workload {name}:{text}: {meaning} must be a number {limits}; write {name}:{default:g}"
        )
    return value


def _whole(weights: FloatArray, total: int) -> IntArray:
    """`total` rows in proportion to the weights: each share rounded down, the rest to the largest remainders.

    Ties go round the diagonals, so that equal weights leave every rank within one row of even.
    """
    share = weights * (total / weights.sum())
    rows: IntArray = np.floor(np.maximum(share - 1e-6, 0)).astype(
        np.int64
    )  # a rounding error must not make too many
    ranks = len(rows)
    left = total - int(rows.sum())
    diagonal = (np.arange(ranks)[None, :] - np.arange(ranks)[:, None]) % ranks
    order = np.lexsort((diagonal.ravel(), -(share - rows).ravel().round(9)))
    rows.ravel()[order[:left]] += 1
    return rows
