"""HybridEP (arXiv 2510.19470): experts move instead of rows between datacenters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from moeyard.assign import assign
from moeyard.cluster import Cluster, Port
from moeyard.cost import step_cost, stream_share
from moeyard.demand import Demand
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.domains import domain_placement, search_domains
from moeyard.provenance import CLOSED_FORM, SIMULATED, Provenance
from moeyard.reproduce.tables import Column, Finding, Paper, either, inside
from moeyard.sim.step import simulate_step

PAPER = "arXiv 2510.19470"
THEIRS = Provenance.published(PAPER)
CLOSE = 0.20  # of the paper's ratio: a cell further off gets a sentence
GPUS = 8  # of a datacenter
RATE, INSIDE = 1.25e9, 16e9  # bytes per second between datacenters (10 Gbit/s) and inside (PCIe 3.0 x16)
LATENCY, INSIDE_LATENCY = 50e-6, 10e-6
FLOPS = 60e12  # of a GPU; next to seconds of transfers it hardly matters
ROW, LAYERS = 4096, 6  # bytes of a row; layers that are simulated: others are proportional
SMALL = 360_000  # bytes of the expert in the table of data sizes
COMPRESSION = 50.0  # of the paper's migration

# Table V: seconds an iteration by megabytes of rows a GPU, of Tutel and of HybridEP, and the average over three rivals.
DATA = (6, 12, 24, 48, 96, 192)
TUTEL = {16: (2.52, 4.26, 5.82, 7.62, 12.65, 20.35), 32: (3.74, 7.30, 10.69, 13.54, 18.59, 28.46)}
HYBRID = {16: (2.48, 2.63, 2.74, 2.82, 3.01, 3.78), 32: (3.49, 3.53, 3.54, 3.85, 4.24, 5.20)}
SPEEDUP = {16: (1.03, 1.64, 2.15, 2.75, 4.22, 5.47), 32: (1.09, 2.10, 3.08, 3.59, 4.49, 5.60)}
# Table VI: seconds with domains alone, and with migration, by GPUs and (data, expert) in megabytes.
ABLATION = {
    (8, 24, 8): (0.76, 0.61), (16, 24, 8): (3.41, 2.54), (32, 24, 8): (6.12, 3.48),
    (8, 48, 2): (1.06, 0.74), (16, 48, 2): (6.21, 2.81), (32, 48, 2): (10.89, 3.86),
}  # fmt: skip
EXPERT_SPEEDUP = (1.18, 2.57)  # Figure 13: 32 MB and 2 MB experts, 16 MB of rows a GPU, no compression
FAR_SPEEDUP = (1.05, 1.45)  # 1000 datacenters, by simulation
# Table IV: case, share sent as data, seconds before the experts, megabytes of data and of an expert; 8 GPUs at 128 Gbit/s.
STREAM = (
    ("Mix-1", 0.75, 0.049e-3, 8, 4.7),
    ("Mix-2", 0.5, 0.049e-3, 8, 2.35),
    ("AG-only-1", 0.0, 0.099e-3, 3, 0.094),
    ("AG-only-2", 0.0, 0.099e-3, 3, 0.047),
)


def cluster_of(gpus: int) -> Cluster:
    """The paper's: nodes of eight that stand for datacenters, one Ethernet port each."""
    places = gpus // GPUS
    wan = Port(RATE, LATENCY) if places > 1 else None
    return Cluster(
        places, GPUS, Port(INSIDE, INSIDE_LATENCY), Port(RATE, LATENCY), nics_per_node=1, datacenters=places, wan=wan
    )  # fmt: skip


def model_of(expert_bytes: float) -> ModelSpec:
    """Experts in float32; nothing beside them: that is in the base of an iteration."""
    size = round(expert_bytes)
    return ModelSpec(row_bytes=ROW, expert_bytes=size, expert_flops=size / 2, flops=FLOPS, layers=LAYERS)


def even(ranks: int, megabytes: float) -> Demand:
    """An expert a GPU, each row equally likely for each: the paper's assumption."""
    rows = round(megabytes * 1e6 / ROW)
    return Demand(np.full((ranks, ranks), max(1, rows // ranks)))


@cache
def iteration(gpus: int, data: float, expert: float, compression: float | None) -> float:
    """Simulated seconds of LAYERS layers, rows straight from rank to rank. compression: of experts in domains, None: experts at home."""
    cluster, model, demand = cluster_of(gpus), model_of(expert * 1e6), even(gpus, data)
    homes = np.arange(gpus)
    if compression is None:
        placement = Placement.of_homes(homes, gpus)
    else:
        found = search_domains(cluster, demand, model=model, compression=compression, home_E=homes)
        placement = domain_placement(cluster, homes, found.sizes)
    served = assign(cluster, demand, placement, "local_first")
    done = simulate_step(
        cluster, model, placement, served, scheduler="direct", compression=compression or 1.0
    )
    return float(done.makespan)


@dataclass(frozen=True, slots=True)
class Scale:
    """What the paper does not tell of a cluster: seconds = base + factor x simulated."""

    factor: float
    base: float

    def seconds(self, simulated: float) -> float:
        return self.base + self.factor * simulated


@cache
def scale_of(gpus: int) -> Scale:
    """From two of the paper's cells: Tutel with the most rows and HybridEP with the fewest."""
    most, least = (
        iteration(gpus, DATA[-1], SMALL / 1e6, None),
        iteration(gpus, DATA[0], SMALL / 1e6, COMPRESSION),
    )
    factor = (TUTEL[gpus][-1] - HYBRID[gpus][0]) / (most - least)
    return Scale(factor, HYBRID[gpus][0] - factor * least)


@dataclass(frozen=True, slots=True)
class Cell:
    """A ratio of the paper's and ours, and the rate at which the paper's plain rows must have crossed, over the wan's."""

    name: str
    theirs: float
    ours: float
    implied: float | None = None

    @property
    def off(self) -> float:
        return self.ours / self.theirs - 1

    @property
    def close(self) -> bool:
        return abs(self.off) <= CLOSE


def data_sizes() -> Finding:
    """Iteration time by the bytes of rows."""
    cells, rows = [], []
    for gpus in TUTEL:
        scale = scale_of(gpus)
        for i, data in enumerate(DATA):
            plain = iteration(gpus, data, SMALL / 1e6, None)
            ours = scale.seconds(plain), scale.seconds(iteration(gpus, data, SMALL / 1e6, COMPRESSION))
            implied = scale.factor * plain / max(TUTEL[gpus][i] - scale.base, 1e-9)
            cells.append(Cell(f"{data} MB on {gpus} GPUs", SPEEDUP[gpus][i], ours[0] / ours[1], implied))
            rows.append(
                (f"{data} MB, {gpus} GPUs", f"{TUTEL[gpus][i]:.2f}", f"{HYBRID[gpus][i]:.2f}", f"{SPEEDUP[gpus][i]:.2f} x",
                 f"{ours[0]:.2f}", f"{ours[1]:.2f}", f"{cells[-1].ours:.2f} x", f"{cells[-1].off:+.0%}", f"{implied:.2f}")
            )  # fmt: skip
    columns = [
        Column("rows a GPU"), Column("Tutel s", THEIRS), Column("HybridEP s", THEIRS), Column("speedup", THEIRS),
        *(Column(name, SIMULATED) for name in ("plain s", "domains s", "ours", "off", "implied rate")),
    ]  # fmt: skip
    fits = "; ".join(
        f"{gpus} GPUs: {s.base:.2f} s + {s.factor:.2f} x {LAYERS} layers" for gpus, s in _scales().items()
    )
    return Finding(
        "Iteration time by the bytes of rows",
        f"0.36 MB experts, one a GPU, even routing, 8 GPUs a datacenter, 10 Gbit/s between, experts compressed {COMPRESSION:g} x; rows go straight from "
        f"rank to rank. The paper does not tell layers nor what else an iteration holds: both are fitted on two cells of a cluster ({fits}), Tutel's last and "
        f"HybridEP's first; the others are ours. Implied rate: bytes of plain's exchanges over what Tutel's time leaves for them, in wan rates.",
        columns, rows, judge_data(cells),
    )  # fmt: skip


def _scales() -> Mapping[int, Scale]:
    return {gpus: scale_of(gpus) for gpus in TUTEL}


def judge_data(cells: Sequence[Cell]) -> str:
    """How many cells are close; of the others, what the paper's own times imply."""
    far = [one for one in cells if not one.close]
    told = f"{len(cells) - len(far)} of {len(cells)} speedups are within {CLOSE:.0%} of the paper's."
    if not far:
        return told
    slow = [one for one in far if one.implied is not None and one.implied < 1 / (1 + CLOSE)]
    names = ", ".join(f"{one.name} ({one.off:+.0%})" for one in far)
    told += f" Further off: {names}."
    if slow:
        rates = [one.implied for one in slow if one.implied is not None]
        told += (
            f" In {len(slow)} of these the paper's Tutel takes so long that its rows cross at {min(rates):.2f} to {max(rates):.2f} of the rate that its own time for "
            f"{DATA[-1]} MB implies; one rate for a link cannot give both, and that its library reaches less with smaller messages is not in our model."
        )
    quick = [one for one in far if one not in slow]
    if quick:
        told += f" In {', '.join(one.name for one in quick)} it is not the rate of plain's rows."
    return told


def expert_sizes() -> Finding:
    """Iteration time by the bytes of an expert, uncompressed."""
    rows, found = [], []
    for expert in (32, 16, 8, 4, 2):
        ratios = []
        for gpus, scale in _scales().items():
            plain, ours = (scale.seconds(iteration(gpus, 16, expert, how)) for how in (None, 1.0))
            ratios.append(plain / ours)
            rows.append((f"{expert} MB, {gpus} GPUs", f"{plain:.2f}", f"{ours:.2f}", f"{plain / ours:.2f} x"))
        found.append(ratios)
    return Finding(
        "Iteration time by the bytes of an expert",
        "16 MB of rows a GPU, experts uncompressed; bases and factors as above. Gradients of gathered experts travel back and are counted.",
        [Column("expert"), *(Column(name, SIMULATED) for name in ("plain s", "domains s", "ours"))],
        rows, judge_experts(found[0], found[-1]),
    )  # fmt: skip


def judge_experts(large: Sequence[float], small: Sequence[float]) -> str:
    """Speedups with the largest and the smallest experts, by cluster."""
    low, high = EXPERT_SPEEDUP
    cells = [Cell("32 MB", low, max(large)), Cell("2 MB", high, max(small))]
    told = f"The paper's figure has {low} x with 32 MB experts and {high} x with 2 MB; ours, the better cluster: {cells[0].ours:.2f} x and {cells[1].ours:.2f} x"
    near = [one.name for one in cells if one.close]
    told += f", within {CLOSE:.0%} at {' and '.join(near) or 'neither end'}."
    below = [one for one in cells if not one.close and one.off < 0]
    if below:
        told += (
            f" Where ours is below ({', '.join(f'{one.name} {one.off:+.0%}' for one in below)}): the paper's model leaves out the gradients of gathered experts, which "
            f"cross the wan uncompressed here, and its plain times at such sizes are above what 10 Gbit/s takes (see the table before)."
        )
    above = [one for one in cells if not one.close and one.off > 0]
    if above:
        told += f" Ours is above at {', '.join(f'{one.name} {one.off:+.0%}' for one in above)}: partitions are searched exactly and experts cross once a datacenter."
    return told


def ablation() -> Finding:
    """Domains alone, and with compressed migration."""
    cells, rows = [], []
    for (gpus, data, expert), (alone, both) in ABLATION.items():
        scale = _ablation_scale(gpus)
        mine = [scale.seconds(iteration(gpus, data, expert, how)) for how in (1.0, COMPRESSION)]
        cells.append(Cell(f"{data} & {expert} MB on {gpus} GPUs", alone / both, mine[0] / mine[1]))
        rows.append(
            (cells[-1].name, f"{alone:.2f}", f"{both:.2f}", f"{cells[-1].theirs:.2f} x", f"{mine[0]:.2f}", f"{mine[1]:.2f}",
             f"{cells[-1].ours:.2f} x", f"{cells[-1].off:+.0%}")
        )  # fmt: skip
    columns = [
        Column("rows & expert"), Column("partition s", THEIRS), Column("+ migration s", THEIRS), Column("saved", THEIRS),
        *(Column(name, SIMULATED) for name in ("domains s", f"compressed {COMPRESSION:g} x s", "ours", "off")),
    ]  # fmt: skip
    return Finding(
        "Ablation",
        "Domains of uncompressed experts, and compressed. One datacenter (8 GPUs) has the factor of two, and a base from its own cell of 24 & 8 MB with migration.",
        columns, rows, judge_ablation(cells),
    )  # fmt: skip


def _ablation_scale(gpus: int) -> Scale:
    if gpus in TUTEL:
        return scale_of(gpus)
    factor = scale_of(min(TUTEL)).factor
    return Scale(factor, ABLATION[gpus, 24, 8][1] - factor * iteration(gpus, 24, 8, COMPRESSION))


def judge_ablation(cells: Sequence[Cell]) -> str:
    """How many ratios are close, and which way the others lie."""
    far = [one for one in cells if not one.close]
    told = f"{len(cells) - len(far)} of {len(cells)} ratios are within {CLOSE:.0%} of the paper's."
    less = [one for one in far if one.off < 0]
    more = [one for one in far if one.off > 0]
    if less:
        told += (
            f" Compression saves less here in {', '.join(f'{one.name} ({one.off:+.0%})' for one in less)}: along a tree an uncompressed expert crosses once a datacenter "
            f"instead of once a GPU, so there is less to compress, and gradients are not compressed."
        )
    if more:
        told += f" It saves more in {', '.join(f'{one.name} ({one.off:+.0%})' for one in more)}."
    return told


def modelling() -> Finding:
    """The stream model's shares, and the number of transfers."""
    rows: list[tuple[str | float, ...]] = []
    wrong = []
    for case, share, before, data, expert in STREAM:
        found = stream_share(
            data=data * 1e6, expert=expert * 1e6, bandwidth=INSIDE, ranks=8, pre_expert=before
        )
        size = min((1, 2, 4, 8), key=lambda s: abs((8 - s) / 7 - found))
        nearest = {1: 1.0, 2: 0.75, 4: 0.5, 8: 0.0}[size]  # as the paper rounds (G - S) / (G - 1)
        wrong += [] if nearest == share else [case]
        rows.append((case, f"{share:g}", f"{found:.2f}", f"{nearest:g}"))
    counts = [
        transfers(ranks, size) for ranks in (8, 16, 32) for size in (1, 2, 4, 8, 16, 32) if size <= ranks
    ]
    exact = all(found == published for found, published in counts)
    return Finding(
        "The stream model",
        "8 GPUs at 128 Gbit/s. p*: the share sent as rows that the published formula gives; beside it the nearest domain size's.",
        [Column("case"), Column("p", THEIRS), Column("p*", CLOSED_FORM), Column("nearest", CLOSED_FORM)],
        rows, judge_modelling(wrong, exact, len(counts)),
    )  # fmt: skip


def judge_modelling(wrong: Sequence[str], exact: bool, counts: int) -> str:
    """wrong: cases whose share differs. exact: whether all numbers of transfers are the published formulas'."""
    shares = either(
        not wrong, "All shares are the paper's.", f"Other shares than the paper's: {', '.join(wrong)}."
    )
    table = either(
        exact,
        f"The numbers of transfers of rows and of experts are those of its table in all {counts} cells, counted on our placements.",
        f"The numbers of transfers are not all those of its table ({counts} cells).",
    )
    return f"{shares} {table}"


def transfers(ranks: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """((rows, experts) pairs of ranks of our placement where a rank's rows for a domain go to one of it, and the paper's formulas')."""
    port = Port(1e9, 0.0)
    cluster = Cluster(1, ranks, port, port)
    placement = domain_placement(cluster, np.arange(ranks), (1, 1, size))
    domain = np.arange(ranks) // size
    experts = int(placement.hosts_ER.sum()) - ranks
    rows = sum(len(set(domain.tolist()) - {int(domain[rank])}) for rank in range(ranks))
    return (rows, experts), (ranks * (ranks // size - 1), ranks * (size - 1))


@dataclass(frozen=True, slots=True)
class Far:
    """One point with very many datacenters: seconds a layer of plain and of domains, the domain's size, seconds to find it."""

    gbit: float
    routing: str
    plain: float
    domains: float
    sizes: tuple[int, int, int]
    took: float


def far_point(
    datacenters: int, gbit: float, skew: float, megabytes: float = 24.0, expert: float = 0.36
) -> Far:
    """One GPU a datacenter, an expert each. skew: exponent of a Zipf law over the experts, 0: even."""
    began = time.perf_counter()
    port = Port(gbit * 1e9 / 8, 5e-3)
    cluster = Cluster(datacenters, 1, Port(INSIDE, 1e-5), port, datacenters=datacenters, wan=port)
    model = model_of(expert * 1e6).but(non_moe_forward=0.05, non_moe_backward=0.1)
    share = (1.0 + np.arange(datacenters)) ** -skew
    rows_E = np.maximum(1, np.round(megabytes * 1e6 / ROW * share / share.sum())).astype(np.int64)
    demand = Demand(np.broadcast_to(np.random.default_rng(0).permutation(rows_E), (datacenters, datacenters)))
    homes = np.arange(datacenters)
    found = search_domains(cluster, demand, model=model, home_E=homes)
    plain = Placement.of_homes(homes, datacenters)
    served = assign(cluster, demand, plain, "home")
    seconds = step_cost(cluster, model, plain, served).steady
    routing = "even" if skew == 0 else f"Zipf {skew:g}"
    return Far(gbit, routing, seconds, found.cost.steady, found.sizes, time.perf_counter() - began)


def far_away() -> Finding:
    """A thousand datacenters."""
    points = [far_point(1000, gbit, skew) for skew in (0.0, 0.5, 1.0) for gbit in (1.0, 5.0, 10.0, 40.0)]
    rows = [
        (f"{p.gbit:g} Gbit/s, {p.routing}", f"{p.plain:.2f} s", f"{p.domains:.2f} s", f"{p.plain / p.domains:.2f} x", f"{p.sizes[0]}", f"{p.took:.1f} s")
        for p in points
    ]  # fmt: skip
    names = ("plain, a layer", "domains, a layer", "ours", "datacenters a domain", "found in")
    return Finding(
        "A thousand datacenters",
        "One GPU and one expert of 0.36 MB each, 24 MB of rows a GPU, 5 ms, 0.15 s a layer for what lies between; uncompressed, closed form (`step_cost`), exact over all "
        "divisors. The last column is this machine's time for the point.",
        [Column("wan"), *(Column(name, CLOSED_FORM) for name in names[:-1]), Column(names[-1], Provenance.measured())], rows, judge_far(points),
    )  # fmt: skip


def judge_far(points: Sequence[Far]) -> str:
    """How the speedups lie to the claim, with even routing and with skew."""
    by_routing: dict[str, list[float]] = {}
    for point in points:
        by_routing.setdefault(point.routing, []).append(point.plain / point.domains)
    parts = [
        f"{name}: {min(r):.2f}-{max(r):.2f} x, {inside(r, *FAR_SPEEDUP)}" for name, r in by_routing.items()
    ]
    means = [float(np.mean(ratios)) for ratios in by_routing.values()]
    skewed = either(
        means[-1] > means[0],
        "Skew makes domains pay more: hot experts' home ports are what plain waits for.",
        "Skew does not make domains pay more.",
    )
    slowest = max(point.took for point in points)
    return (
        f"The paper has {FAR_SPEEDUP[0]}-{FAR_SPEEDUP[1]} x with domains of a fixed size; its rows, experts and bandwidths are not published, so ranges are compared. Ours, size "
        f"chosen: {'; '.join(parts)}. {skewed} The slowest point took {slowest:.0f} s."
    )


HYBRIDEP = Paper(
    "hybridep", "HybridEP: experts move instead of rows", PAPER,
    {"model": modelling, "data": data_sizes, "experts": expert_sizes, "ablation": ablation, "far": far_away},
)  # fmt: skip
