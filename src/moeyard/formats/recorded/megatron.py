"""Megatron's router as JSON lines: one line a step, layer and rank, with the experts that its tokens chose."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from moeyard.arrays import IntArray
from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike, named, short
from moeyard.trace import Trace

MOST_EXPERTS = 1 << 14  # a larger number is a slip, and would fill the memory
_KEYS = ("step", "layer", "rank", "topk", "top_indices")


def read_megatron(path: PathLike) -> Trace:
    """{"step", "layer", "rank", "topk", "top_indices"}: tokens x topk experts, or all of them in one list; -1: none, a dropped row.

    Lines of the same step, layer and rank (micro-batches) add up. `num_experts` may be on any line; else the highest seen counts.
    """
    chosen: dict[tuple[int, int, int], IntArray] = {}
    highest, told, top = (-1, 0), (0, 0), set()  # expert chosen, experts said; each with its line
    with open(path, encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    at, picked, said, k = _line(f"{path}:{number}", line)
                    highest = max(highest, (int(picked.max(initial=-1)), number))
                    told = max(told, (said, number))
                    top.add(k)
                    count = np.bincount(picked[picked >= 0])
                    chosen[at] = _sum(chosen[at], count) if at in chosen else count
        except UnicodeDecodeError as error:
            raise InvalidFile(f"{path}: not text: {error}") from error
    experts = told[0] or highest[0] + 1
    if highest[0] >= experts:
        raise InvalidFile(
            f"{path}:{highest[1]}: expert {highest[0]} is chosen, line {told[1]} says num_experts {experts}; correct one of them"
        )
    if not chosen:
        raise InvalidFile(f"{path}: empty; give one line of JSON per step, layer and rank")
    steps, layers, ranks = (sorted({at[i] for at in chosen}) for i in range(3))
    if ranks != list(range(len(ranks))):
        missing = next(r for r in range(len(ranks)) if r not in ranks)
        raise InvalidFile(f"{path}: no line of rank {missing}; ranks are numbered from 0 without a gap")
    if len(chosen) != len(steps) * len(layers) * len(ranks):
        s, m, r = next((s, m, r) for s in steps for m in layers for r in ranks if (s, m, r) not in chosen)
        raise InvalidFile(
            f"{path}: step {s}, layer {m} has no line of rank {r}; take out the steps that are not whole"
        )
    counts = np.zeros((len(steps), len(layers), len(ranks), max(experts, 1)), dtype=np.int64)
    for (step, layer, rank), count in chosen.items():
        counts[steps.index(step), layers.index(layer), rank, : len(count)] = count
    meta = {"source": "Megatron router lines", "top_k": max(top), "layers": layers}
    with named(path):
        return Trace(counts, steps, meta)


def _line(place: str, line: str) -> tuple[tuple[int, int, int], IntArray, int, int]:
    """(step, layer, rank), the experts chosen, how many there are if it says so, top-k."""
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{place}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise InvalidFile(f"{place}: must be an object with {', '.join(_KEYS)}, got {short(entry)}")
    missing = [key for key in _KEYS if key not in entry]
    if missing:
        raise InvalidFile(f"{place}: missing key {missing[0]!r}; a router's line has {', '.join(_KEYS)}")
    for key in ("step", "layer", "rank", "topk", "num_experts"):
        value = entry.get(key, 0)
        if type(value) is not int or not 0 <= value < 2**62:
            raise InvalidFile(f"{place}: {key} must be a whole number of at least 0, got {short(value)}")
    picked = _picked(place, entry["top_indices"], entry["topk"])
    experts, highest = entry.get("num_experts", 0), int(picked.max(initial=-1))
    if max(experts, highest + 1) > MOST_EXPERTS:
        raise InvalidFile(f"{place}: more than {MOST_EXPERTS} experts; number them from 0")
    if experts and highest >= experts:
        raise InvalidFile(
            f"{place}: expert {highest} is chosen of num_experts {experts}, numbered from 0; correct one of them"
        )
    return (entry["step"], entry["layer"], entry["rank"]), picked, experts, entry["topk"]


def _picked(place: str, given: Any, topk: int) -> IntArray:
    try:
        found = np.array(given if isinstance(given, list) else None)
    except (ValueError, OverflowError):
        found = np.array(None)
    if found.size == 0 and found.ndim:
        return np.zeros(0, dtype=np.int64)  # a rank without tokens
    whole = found.dtype.kind in "iu" and found.ndim and int(found.max()) < 2**62
    if (
        not whole
        or found.min() < -1
        or topk < 1
        or (found.shape[-1] if found.ndim > 1 else found.size) % topk
    ):
        raise InvalidFile(
            f"{place}: top_indices must be lists of topk = {topk} experts (-1: none), got {short(given)}"
        )
    return found.reshape(-1).astype(np.int64)


def _sum(a: IntArray, b: IntArray) -> IntArray:
    total = np.zeros(max(len(a), len(b)), dtype=np.int64)
    total[: len(a)] += a
    total[: len(b)] += b
    return total
