"""HybridEP (arXiv 2510.19470): experts move instead of rows between datacenters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from moeyard.assign import assign
from moeyard.cluster import Cluster, Port
from moeyard.cost import stream_share
from moeyard.placement import Placement
from moeyard.planners.domains import domain_placement, search_domains
from moeyard.provenance import CLOSED_FORM, SIMULATED, Provenance
from moeyard.reproduce.datacenters import INSIDE, LAYERS, cluster_of, even, far_away, model_of, winners
from moeyard.reproduce.tables import Column, Finding, Paper, either
from moeyard.sim.step import simulate_step

PAPER = "arXiv 2510.19470"
THEIRS = Provenance.published(PAPER)
CLOSE = 0.20  # of the paper's ratio: a cell further off gets a sentence
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
# Table IV: case, share sent as data, seconds before the experts, megabytes of data and of an expert; 8 GPUs at 128 Gbit/s.
STREAM = (
    ("Mix-1", 0.75, 0.049e-3, 8, 4.7),
    ("Mix-2", 0.5, 0.049e-3, 8, 2.35),
    ("AG-only-1", 0.0, 0.099e-3, 3, 0.094),
    ("AG-only-2", 0.0, 0.099e-3, 3, 0.047),
)


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
    """What the paper does not tell of a cluster: seconds = base + a megabyte's x megabytes of rows + factor x simulated."""

    factor: float
    base: float
    megabyte: float

    def rest(self, data: float) -> float:
        """Of an iteration, beside its exchanges and gathers."""
        return self.base + self.megabyte * data

    def seconds(self, data: float, simulated: float) -> float:
        return self.rest(data) + self.factor * simulated


@cache
def scale_of(gpus: int) -> Scale:
    """From three of the paper's cells: HybridEP with the fewest and the most rows, and Tutel with the most."""
    small, (few, many) = SMALL / 1e6, (DATA[0], DATA[-1])
    least, most = (iteration(gpus, data, small, COMPRESSION) for data in (few, many))
    plain = iteration(gpus, many, small, None)
    factor = (TUTEL[gpus][-1] - HYBRID[gpus][-1]) / (plain - most)
    rest = [HYBRID[gpus][i] - factor * seconds for i, seconds in ((0, least), (-1, most))]
    megabyte = (rest[1] - rest[0]) / (many - few)
    return Scale(factor, rest[0] - megabyte * few, megabyte)


@dataclass(frozen=True, slots=True)
class Cell:
    """A ratio of the paper's and ours, and the rate at which the paper's plain rows must have crossed, over the wan's."""

    name: str
    theirs: float
    ours: float
    implied: float | None = None
    fitted: bool = False  # both its times were given to the fit

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
            far = iteration(gpus, data, SMALL / 1e6, COMPRESSION)
            ours = scale.seconds(data, plain), scale.seconds(data, far)
            implied = scale.factor * plain / max(TUTEL[gpus][i] - scale.rest(data), 1e-9)
            cells.append(
                Cell(
                    f"{data} MB on {gpus} GPUs",
                    SPEEDUP[gpus][i],
                    ours[0] / ours[1],
                    implied,
                    data == DATA[-1],
                )
            )
            rows.append(
                (f"{data} MB, {gpus} GPUs", f"{TUTEL[gpus][i]:.2f}", f"{HYBRID[gpus][i]:.2f}", f"{SPEEDUP[gpus][i]:.2f} x",
                 f"{ours[0]:.2f}", f"{ours[1]:.2f}", f"{cells[-1].ours:.2f} x", f"{cells[-1].off:+.0%}", f"{implied:.2f}")
            )  # fmt: skip
    columns = [
        Column("rows a GPU"), Column("Tutel s", THEIRS), Column("HybridEP s", THEIRS), Column("speedup", THEIRS),
        *(Column(name, SIMULATED) for name in ("plain s", "domains s", "ours", "off", "implied rate")),
    ]  # fmt: skip
    fits = "; ".join(
        f"{gpus} GPUs: {s.base:.2f} s + {1e3 * s.megabyte:.1f} ms a MB + {s.factor:.2f} x {LAYERS} layers"
        for gpus, s in _scales().items()
    )
    return Finding(
        "Iteration time by the bytes of rows",
        f"0.36 MB experts, one a GPU, even routing, 8 GPUs a datacenter, 10 Gbit/s between, experts compressed {COMPRESSION:g} x; rows go straight from "
        f"rank to rank. The paper does not tell layers nor what else an iteration holds: both are fitted on three cells of a cluster ({fits}), Tutel's last and "
        f"HybridEP's first and last; the others are ours. Implied rate: bytes of plain's exchanges over what Tutel's time leaves for them, in wan rates.",
        columns, rows, judge_data(cells),
    )  # fmt: skip


def _scales() -> Mapping[int, Scale]:
    return {gpus: scale_of(gpus) for gpus in TUTEL}


def judge_data(cells: Sequence[Cell]) -> str:
    """How many cells are close; of the others, what the paper's own times imply."""
    far = [one for one in cells if not one.close]
    own = [one for one in cells if not one.fitted]
    told = f"{sum(one.close for one in own)} of {len(own)} speedups that were not fitted are within {CLOSE:.0%} of the paper's."
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
        told += f" In {', '.join(one.name for one in quick)} it is not that."
    return told


def expert_sizes() -> Finding:
    """Iteration time by the bytes of an expert, uncompressed."""
    rows, found = [], []
    for expert in (32, 16, 8, 4, 2):
        ratios = []
        for gpus, scale in _scales().items():
            plain, ours = (scale.seconds(16, iteration(gpus, 16, expert, how)) for how in (None, 1.0))
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
        mine = [scale.seconds(data, iteration(gpus, data, expert, how)) for how in (1.0, COMPRESSION)]
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
    two = scale_of(min(TUTEL))
    rest = ABLATION[gpus, 24, 8][1] - two.factor * iteration(gpus, 24, 8, COMPRESSION)
    return Scale(two.factor, rest - two.megabyte * 24, two.megabyte)


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
    wrong: dict[str, list[str]] = {"bits": [], "bytes": []}
    for case, share, before, data, expert in STREAM:
        shown: list[str | float] = [case, f"{share:g}"]
        for unit, rate in (("bits", INSIDE), ("bytes", 8 * INSIDE)):
            found = stream_share(
                data=data * 1e6, expert=expert * 1e6, bandwidth=rate, ranks=8, pre_expert=before
            )
            wrong[unit] += [] if _rounded(found) == share else [case]
            shown += [f"{found:.2f}", f"{_rounded(found):g}"]
        rows.append(tuple(shown))
    counts = [
        transfers(ranks, size) for ranks in (8, 16, 32) for size in (1, 2, 4, 8, 16, 32) if size <= ranks
    ]
    exact = all(found == published for found, published in counts)
    names = ("p*, 128 Gbit/s", "nearest", "p*, 128 GB/s", "nearest then")
    return Finding(
        "The stream model",
        "8 GPUs. p*: the share sent as rows that the published formula gives at the rate that the table names, and at eight times that; beside each the "
        "nearest domain size's, as the paper rounds it.",
        [Column("case"), Column("p", THEIRS), *(Column(name, CLOSED_FORM) for name in names)],
        rows, judge_modelling(wrong["bits"], wrong["bytes"], exact, len(counts)),
    )  # fmt: skip


def _rounded(share: float) -> float:
    """The share of the domain size whose (G - S) / (G - 1) is nearest; the paper calls it 1 - S / G, and 1 where S is 1."""
    size = min((1, 2, 4, 8), key=lambda s: abs((8 - s) / 7 - share))
    return 1.0 if size == 1 else 1 - size / 8


def judge_modelling(bits: Sequence[str], in_bytes: Sequence[str], exact: bool, counts: int) -> str:
    """bits, in_bytes: cases whose share differs at either rate. exact: whether all numbers of transfers are the published formulas'."""
    if not bits:
        shares = "All shares are the paper's."
    elif not in_bytes:
        shares = f"{' and '.join(bits)} are the paper's only if its 128 Gbit/s are taken for 128 GB/s."
    else:
        shares = (
            f"Other shares than the paper's: {', '.join(bits)}; with bytes for bits {', '.join(in_bytes)}."
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


HYBRIDEP = Paper(
    "hybridep", "HybridEP: experts move instead of rows", PAPER,
    {"model": modelling, "data": data_sizes, "experts": expert_sizes, "ablation": ablation, "map": winners, "far": far_away},
)  # fmt: skip
