"""Demand over time by name: how routers may behave, with everything about it in the name. docs/replay.md defines them.

hot-set                  with its usual parameters
hot-set:0.7              the first of them
hot-set:share=0.7,experts=4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeyard.arrays import FloatArray, IntArray
from moeyard.errors import MoeyardError, UnknownName
from moeyard.trace import Trace


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is made: so many records of so many layers, each rank's tokens choosing `top_k` experts."""

    records: int = 32
    layers: int = 4
    experts: int = 64
    tokens: int = 4096  # per rank and record
    top_k: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for what in ("records", "layers", "experts", "tokens", "top_k"):
            if not 1 <= getattr(self, what) <= 1 << 20:
                raise MoeyardError(f"{what} must be from 1 to 2**20, got {getattr(self, what)}")
        if self.top_k > self.experts:
            raise MoeyardError(
                f"top_k {self.top_k} of {self.experts} experts: a token chooses different ones; use more experts"
            )
        if self.seed < 0:
            raise MoeyardError(f"seed must be zero or more, got {self.seed}")


@dataclass(frozen=True, slots=True)
class Scene:
    """What a definition sees: one layer at one record."""

    ranks: int
    experts: int
    record: int
    order: IntArray  # the experts of this layer in an order of its own, by the seed
    value: dict[str, float]

    def set_size(self) -> int:
        """Experts in a hot set: as given, else one in eight."""
        return int(min(self.experts, self.value["experts"] or max(1, self.experts // 8)))

    def even(self) -> FloatArray:
        return np.full(self.experts, 1.0 / self.experts)

    def hot(self, chosen: IntArray, share: float) -> FloatArray:
        """`share` of the rows for these experts alike, the rest for the others alike."""
        weight = np.full(self.experts, (1 - share) / max(1, self.experts - len(chosen)))
        weight[chosen] = share / len(chosen)
        return weight


Weights = tuple[
    FloatArray, FloatArray
]  # each expert's share [expert], each rank's tokens over the mean [rank]


def _balanced(scene: Scene) -> Weights:
    return scene.even(), np.ones(scene.ranks)


def _hot_set(scene: Scene) -> Weights:
    return scene.hot(scene.order[: scene.set_size()], scene.value["share"]), np.ones(scene.ranks)


def _hot_rank(scene: Scene) -> Weights:
    home = np.arange(scene.experts) * scene.ranks // scene.experts
    own = np.flatnonzero(home == home[scene.order[0]])
    share = scene.value["share"] or max(0.125, min(0.9, 4 / scene.ranks))
    return scene.hot(own, share), np.ones(scene.ranks)


def _spread(scene: Scene) -> Weights:
    weight = np.empty(scene.experts)
    weight[scene.order] = np.arange(1.0, scene.experts + 1) ** -scene.value["exponent"]
    return weight, np.ones(scene.ranks)


def _ragged_source(scene: Scene) -> Weights:
    ends = scene.value["spread"]
    return scene.even(), np.linspace(1 - ends, 1 + ends, scene.ranks)


def _zero_load_rank(scene: Scene) -> Weights:
    idle = int(scene.value["ranks"])
    if idle >= scene.ranks:
        raise MoeyardError(
            f"zero-load-rank:{idle}: of {scene.ranks} ranks at least one must have rows; give fewer"
        )
    home = np.arange(scene.experts) * scene.ranks // scene.experts
    weight = np.where(home < scene.ranks - idle, 1.0, 0.0)
    return weight, np.where(np.arange(scene.ranks) < scene.ranks - idle, 1.0, 0.0)


def _rotating_hotspot(scene: Scene) -> Weights:
    size, turn = scene.set_size(), scene.record // max(1, int(scene.value["period"]))
    chosen = scene.order[(np.arange(size) + turn * size) % scene.experts]
    return scene.hot(np.unique(chosen), scene.value["share"]), np.ones(scene.ranks)


def _burst(scene: Scene) -> Weights:
    period, length = max(1, int(scene.value["period"])), int(scene.value["length"])
    if scene.record % period < period - length:
        return _balanced(scene)
    size, turn = scene.set_size(), scene.record // period
    chosen = scene.order[(np.arange(size) + turn * size) % scene.experts]
    return scene.hot(np.unique(chosen), scene.value["share"]), np.ones(scene.ranks)


# name -> (its parameters with what they usually are, what it is)
DEMANDS: dict[str, tuple[dict[str, float], Callable[[Scene], Weights]]] = {
    "balanced": ({}, _balanced),
    "hot-set": ({"share": 0.5, "experts": 0}, _hot_set),
    "hot-rank": ({"share": 0}, _hot_rank),
    "spread": ({"exponent": 0.9}, _spread),
    "ragged-source": ({"spread": 0.5}, _ragged_source),
    "zero-load-rank": ({"ranks": 1}, _zero_load_rank),
    "rotating-hotspot": ({"share": 0.5, "period": 8, "experts": 0}, _rotating_hotspot),
    "burst": ({"share": 0.5, "period": 8, "length": 2, "experts": 0}, _burst),
}
_MOST = {"share": 1.0, "spread": 1.0, "exponent": 8.0}
_WHOLE = ("experts", "ranks", "period", "length")


def demand_over_time(spec: str, ranks: int, shape: Shape | None = None) -> Trace:
    """A trace by name: the same for the same name, ranks, shape and seed."""
    shape = shape or Shape()
    name, value = _read(spec)
    if ranks < 1:
        raise MoeyardError(f"demand for {ranks} ranks; give at least one")
    rng = np.random.default_rng([shape.seed, *name.encode()])
    orders = [rng.permutation(shape.experts) for _ in range(shape.layers)]
    counts = np.empty((shape.records, shape.layers, ranks, shape.experts), dtype=np.int64)
    for record in range(shape.records):
        for layer in range(shape.layers):
            scene = Scene(ranks, shape.experts, record, orders[layer], value)
            weight_E, tokens_R = DEMANDS[name][1](scene)
            share_E = _capped(weight_E / weight_E.sum(), shape.top_k)
            tokens = np.rint(tokens_R * shape.tokens).astype(np.int64)
            drawn = rng.multinomial(tokens * shape.top_k, share_E)
            counts[record, layer] = _at_most(drawn, tokens)
    said = ", ".join(f"{key}={number:g}" for key, number in value.items() if number)
    meta = {"source": f"made: {name}{f' ({said})' if said else ''}, seed {shape.seed}", "top_k": shape.top_k}
    return Trace(counts, None, meta)


def _capped(share_E: FloatArray, top_k: int) -> FloatArray:
    """No expert has more than one row of a token: what is above 1 / top_k goes to the others in proportion."""
    most = 1.0 / top_k
    share = share_E.copy()
    for _ in range(len(share)):
        over = share > most
        below = ~over & (share > 0) & (share < most)
        extra = float((share[over] - most).sum())
        if extra <= 1e-15 or not below.any():
            break
        share[over] = most
        share[below] *= 1 + extra / float(share[below].sum())
    share /= share.sum()
    return share


def _at_most(drawn_RE: IntArray, tokens_R: IntArray) -> IntArray:
    """The draw, but no expert with more rows of a rank than that has tokens; the rest goes to those with the most room."""
    rows = np.minimum(drawn_RE, tokens_R[:, None])
    for rank in np.flatnonzero(rows.sum(axis=1) < drawn_RE.sum(axis=1)):
        left = int(drawn_RE[rank].sum() - rows[rank].sum())
        for expert in np.argsort(rows[rank], kind="stable"):
            given = min(left, int(tokens_R[rank] - rows[rank, expert]))
            rows[rank, expert] += given
            left -= given
    return rows


def _read(spec: str) -> tuple[str, dict[str, float]]:
    """The name and all its parameters."""
    name, _, text = spec.partition(":")
    if name not in DEMANDS:
        raise UnknownName.of("demand over time", name, DEMANDS)
    value = dict(DEMANDS[name][0])
    for i, part in enumerate(text.split(",") if text else []):
        key, equals, number = part.partition("=")
        if not equals:
            key, number = ([*list(value), ""])[0] if i == 0 else "", part
        if key not in value:
            known = ", ".join(f"{k}={v:g}" for k, v in DEMANDS[name][0].items()) or "none"
            raise MoeyardError(f"{spec}: cannot read {part!r}; {name} has the parameters: {known}")
        try:
            found = float(number)
        except ValueError:
            found = np.nan
        if not 0 <= found <= _MOST.get(key, 1e6):
            raise MoeyardError(
                f"{spec}: {key} must be a number from 0 to {_MOST.get(key, 1e6):g}, got {number!r}; "
                f"write {name}:{key}={value[key]:g}"
            )
        if key in _WHOLE and found != int(found):
            raise MoeyardError(f"{spec}: {key} must be a whole number, got {number!r}")
        value[key] = found
    if value.get("length", 0) > value.get("period", 0):
        raise MoeyardError(
            f"{spec}: a burst of {value['length']:g} records does not fit into every {value['period']:g}; give a longer period"
        )
    return name, value
