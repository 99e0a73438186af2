"""RailS (arXiv 2510.19262): spraying over rails."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moeyard.arrays import IntArray
from moeyard.assign import assign
from moeyard.bounds import bound
from moeyard.cluster import Cluster, Port
from moeyard.compare import nic_loads
from moeyard.demand import Demand
from moeyard.formats import load_cluster
from moeyard.formats.models import load_model
from moeyard.formats.traces import find_trace
from moeyard.planners import place
from moeyard.provenance import CLOSED_FORM, SIMULATED
from moeyard.reproduce.tables import Column, Finding, Paper, either, inside, percent, span
from moeyard.schedule import Schedule
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.sim.step import simulate_step
from moeyard.traffic import Traffic
from moeyard.workloads import workload

WORKLOADS = ("balanced", "random", "zipf:0.9", "hot:0.25", "sparse:0.1")
PAPER = "arXiv 2510.19262"
# What the paper claims over conventional load balancing: shorter completion, more bus bandwidth, that on sparse traffic,
# and a shorter iteration of Mixtral.
SHORTER, WIDER, SPARSE, ITERATION = (0.17, 0.78), (0.20, 0.78), (2.0, 3.0), (0.18, 0.40)
# Busiest receiving rail over the mean one, counted with a plain longest-first program apart from this code.
PLAIN_LPT = {"whole flows": (1.2, 1.9), "4 MB chunks": (1.05, 1.23), "1 MB chunks": (1.01, 1.05)}
EVEN = "even split (rails)"


def completion() -> Finding:
    """Completion time and bus bandwidth over ECMP."""
    rows: list[tuple[str | float, ...]] = []
    shorter, wider, sparse = [], [], []
    base = load_cluster("h200-4x8")
    for nodes in (4, 16):
        for kind in WORKLOADS:
            cluster = base.but(nodes=nodes, rails=None, speed=None)
            traffic = workload(kind, cluster.num_ranks, mb=64)
            runs = {
                name: simulate(cluster, schedule(cluster, traffic, name), tolerance=0.005)
                for name in ("ecmp", "rails", "auto")
            }
            time = {name: run.makespan for name, run in runs.items()}
            bus = {name: run.busbw for name, run in runs.items()}
            shorter.append(1 - time["rails"] / time["ecmp"])
            wider.append(bus["rails"] / bus["ecmp"] - 1)
            if kind.startswith("sparse"):
                sparse.append(bus["rails"] / bus["ecmp"])
            rows.append(
                (
                    f"{kind}, {nodes} x 8",
                    f"{time['ecmp'] * 1e3:.2f} ms",
                    f"{time['rails'] * 1e3:.2f} ms",
                    percent(time["rails"] / time["ecmp"]),
                    percent(bus["rails"] / bus["ecmp"]),
                    percent(time["auto"] / time["ecmp"]),
                    f"{time['rails'] / bound(cluster, traffic):.2f}",
                )
            )
    names = ("ecmp", "rails", "rails: time", "rails: bus bandwidth", "auto: time", "rails x bound")
    return Finding(
        "Completion time and bus bandwidth over ECMP",
        "h200 nodes of 8 ranks and 8 nics of 48.85 GB/s, 64 MB per rank, ideal law; simulated to within 0.5%.",
        [Column("traffic"), *(Column(name, SIMULATED) for name in names)], rows, judge_completion(shorter, wider, sparse),
    )  # fmt: skip


def judge_completion(shorter: Sequence[float], wider: Sequence[float], sparse: Sequence[float]) -> str:
    """shorter: 1 - time over ECMP's; wider: bus bandwidth over ECMP's - 1; sparse: that ratio on sparse traffic."""
    return (
        f"RailS claims -{SHORTER[0]:.0%}..{SHORTER[1]:.0%} completion time and +{WIDER[0]:.0%}..{WIDER[1]:.0%} bus bandwidth over conventional "
        f"load balancing, and {SPARSE[0]:g}-{SPARSE[1]:g}x bus bandwidth on sparse traffic. Ours: {span([-s for s in shorter])} time, "
        f"{inside(shorter, *SHORTER)}; {span(wider)} bus bandwidth, {inside(wider, *WIDER)}; sparse {min(sparse):.1f}-{max(sparse):.1f}x, "
        f"{inside(sparse, *SPARSE)}. Our ECMP hashes every block to a rail once and shares fairly; the paper's simulator, loads and sizes "
        f"are not published in full, so the ranges can be compared, single cells cannot. (1 - 0.78 in time would be 4.5x in bandwidth: the "
        f"two claims are of different cells.)"
    )


@dataclass(frozen=True, slots=True)
class Evenness:
    """What the traffics of `symmetry` showed. Ratios: busiest rail over the mean rail of the busiest node."""

    sent: Mapping[str, Sequence[float]]  # spray -> one a traffic
    received: Mapping[str, Sequence[float]]
    split_rows: int  # of the even split: most by which two rails of one pair of nodes differ
    receiver_rows: int  # and two rails of one receiver
    senders: int  # nodes that send to a receiver
    graham: float  # longest-first's limit for the sender


def symmetry() -> Finding:
    """Even sending makes even receiving: LPT at several chunk sizes against the even split."""
    found = evenness(
        load_cluster("h200-4x8").but(nodes=8, rails=None, speed=None), ("random", "zipf:0.9", "sparse:0.1"), 8
    )
    rows = [
        (
            name,
            f"{max(found.sent[name]):.3f}",
            f"{min(found.received[name]):.3f}-{max(found.received[name]):.3f}",
            "-".join(f"{x:g}" for x in PLAIN_LPT[name]) if name in PLAIN_LPT else "-",
        )
        for name in found.sent
    ]
    columns = [
        Column("spray"),
        Column("worst sender", CLOSED_FORM),
        Column("receivers", CLOSED_FORM),
        Column("receivers of another LPT", CLOSED_FORM),
    ]
    return Finding(
        "Uniform sending, uniform receiving",
        "8 nodes x 8 nics, 64 MB per rank, random, Zipf 0.9 and 10% sparse traffic, 8 seeds; bytes of the busiest "
        "rail over the mean rail of the busiest node, counted. The right column was counted with a plain longest-first program apart from this code.",
        columns, rows, judge_symmetry(found),
    )  # fmt: skip


def evenness(cluster: Cluster, kinds: Sequence[str], seeds: int, mb: float = 64) -> Evenness:
    """Every spray on every kind of traffic and seed."""
    chunks = {"whole flows": None, "4 MB chunks": 4e6, "1 MB chunks": 1e6}
    sent: dict[str, list[float]] = {name: [] for name in (*chunks, EVEN)}
    received: dict[str, list[float]] = {name: [] for name in sent}
    split = receiver = 0
    for seed in range(seeds):
        for kind in kinds:
            traffic = workload(kind, cluster.num_ranks, mb=mb, seed=seed)
            loads = {name: lpt_loads(cluster, traffic, size) for name, size in chunks.items()}
            planned = schedule(cluster, traffic, "rails")
            loads[EVEN] = nic_loads(planned)[1:]
            one, other = uneven_rows(planned)
            split, receiver = max(split, one), max(receiver, other)
            for name, (out, into) in loads.items():
                one_way, back = _over_bound(out, into)
                sent[name].append(one_way)
                received[name].append(back)
    graham = 4 / 3 - 1 / (3 * cluster.nics_per_node)
    return Evenness(sent, received, split, receiver, cluster.nodes - 1, graham)


def uneven_rows(planned: Schedule) -> tuple[int, int]:
    """(rows by which two rails of one pair of nodes differ at most, and two rails of one receiving node)."""
    cluster = planned.cluster
    table = planned.messages()
    table = table[planned.stages.scale_out[table["stage"]]]
    node = cluster.node_R
    rail = cluster.nic_G[table["src"] % cluster.ranks_per_node]
    rows_NNM = np.zeros((cluster.nodes, cluster.nodes, cluster.nics_per_node), np.int64)
    np.add.at(rows_NNM, (node[table["src"]], node[table["dst"]], rail), table["rows"])
    into_NM = rows_NNM.sum(axis=0)
    return int(np.ptp(rows_NNM, axis=2).max()), int(np.ptp(into_NM, axis=1).max())


def judge_symmetry(found: Evenness) -> str:
    """Whether even splits gave even receivers; whether longest-first kept its limit; who is the most even."""
    cases = len(found.received[EVEN])
    if found.split_rows > 1:
        theorem = (
            f"The theorem is not tested: its premise, an even split of every pair's rows, does not hold here (two rails of a pair differ by "
            f"{found.split_rows} rows)."
        )
    elif found.receiver_rows <= found.senders:
        theorem = (
            f"The theorem holds on all {cases} traffics: every node's rows for each destination are split to within a row, and no two rails of "
            f"a receiver differ by more than {found.receiver_rows} rows (a row of each of {found.senders} senders would be {found.senders})."
        )
    else:
        theorem = (
            f"The theorem does NOT hold on these {cases} traffics: every pair's rows are split to within a row, yet two rails of a receiver "
            f"differ by {found.receiver_rows} rows, more than one of each of {found.senders} senders."
        )
    greedy = [name for name in found.sent if name != EVEN]
    beyond = [name for name in greedy if max(found.sent[name]) > found.graham]
    sender = either(
        not beyond,
        f"Longest-first keeps its limit ({found.graham:.3f}, Graham's) at the sender",
        f"Longest-first is above {found.graham:.3f} (Graham's limit, over the best) of the mean rail at the sender with {' and '.join(beyond)}",
    )
    worst = [max(found.received[name]) for name in greedy]
    receiver = ", ".join(f"{w:.2f} with {name}" for w, name in zip(worst, greedy, strict=True))
    smaller = either(
        all(a > b for a, b in pairwise(worst)),
        "the more even the smaller the chunks",
        "not always more even with smaller chunks",
    )
    least = min(found.received, key=lambda name: max(found.received[name]))
    best = either(
        least == EVEN,
        "The even split is the most even of all: that is why `rails` here splits per destination and rotates the remainder.",
        f"The most even of all is {least}, not the even split.",
    )
    return f"{theorem} {sender}; its receivers carry up to {receiver}: {smaller}. {best}"


def lpt_loads(cluster: Cluster, traffic: Traffic, chunk: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes sent and received by each nic [node, rail] when every node puts its largest chunk on its least loaded rail."""
    nodes, rails, per = cluster.nodes, cluster.nics_per_node, cluster.ranks_per_node
    size = traffic.rows * float(traffic.row_bytes)
    out, received = np.zeros((nodes, rails)), np.zeros((nodes, rails))
    for node in range(nodes):
        flows: list[tuple[float, int]] = []
        for src in range(node * per, (node + 1) * per):
            for dst in np.flatnonzero(size[src]).tolist():
                if dst // per != node:
                    flows += [(part, dst // per) for part in _pieces(size[src, dst], chunk)]
        flows.sort(key=lambda flow: (-flow[0], flow[1]))
        heap = [(0.0, rail) for rail in range(rails)]
        for part, target in flows:
            load, rail = heapq.heappop(heap)
            received[target, rail] += part
            heapq.heappush(heap, (load + part, rail))
        for load, rail in heap:
            out[node, rail] = load
    return out, received


def _pieces(size: float, chunk: float | None) -> list[float]:
    if chunk is None or size <= chunk:
        return [size]
    whole = int(size // chunk)
    rest = size - whole * chunk
    return [chunk] * whole + ([rest] if rest else [])


def _over_bound(out_NM: np.ndarray, in_NM: np.ndarray) -> tuple[float, float]:
    """(busiest sending rail, busiest receiving rail) over what the busiest node's rails must carry on average."""
    least = max(out_NM.mean(axis=1).max(), in_NM.mean(axis=1).max())
    return float(out_NM.max() / least), float(in_NM.max() / least)


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds of one training step with nics of one rate."""

    gbit: float
    ecmp: float
    rails: float
    auto: float  # replicas of the hot experts, scheduler auto


def iteration() -> Finding:
    """Mixtral's iteration time, from fast nics to slow ones."""
    trace = find_trace("mixtral-8")
    layers = range(0, trace.num_layers, 2)
    tokens, spread = 8192, 4  # each expert of the trace stands for four: each of 32 ranks is home to one
    demands = [
        Demand(shared_evenly(trace.demand(-1, layer).rows * (tokens // 2048), spread)) for layer in layers
    ]
    found = [_iteration(gbit, demands, tokens) for gbit in (400, 100, 25)]
    rows = [
        (
            f"{one.gbit:g} Gbit/s",
            f"{one.ecmp * 1e3:.0f} ms",
            f"{one.rails * 1e3:.0f} ms",
            percent(one.rails / one.ecmp),
            f"{one.auto * 1e3:.0f} ms",
            percent(one.auto / one.ecmp),
        )
        for one in found
    ]
    names = ("ecmp", "rails", "rails: change", "replicas + auto", "replicas + auto: change")
    return Finding(
        "Mixtral's iteration time",
        f"Layers of Mixtral 8x7B, {tokens} tokens and one expert a rank, 4 nodes x 8 ranks, 400 TFLOP/s each, ideal law; skew of the trace "
        f"mixtral-8 (last record, every second layer; each expert's rows shared by four). ecmp and rails: experts at home; auto: planner "
        f"quota with one slot a rank, scheduler auto.",
        [Column("nics"), *(Column(name, SIMULATED) for name in names)], rows, judge_iteration(found),
    )  # fmt: skip


def _iteration(gbit: float, demands: Sequence[Demand], tokens: int) -> Iteration:
    cluster = load_cluster("h200-4x8")
    cluster = cluster.but(scale_out=Port(gbit * 1e9 / 8, cluster.scale_out.latency))
    model = load_model("mixtral-8x7b", tokens_per_rank=tokens).but(layers=len(demands))
    seconds = {}
    for name, planner, policy, slots in (
        ("ecmp", "static", "home", None), ("rails", "static", "home", None), ("auto", "quota", "auto", 1),
    ):  # fmt: skip
        hosts = [place(cluster, demand, planner, slots, model) for demand in demands]
        served = [assign(cluster, d, p, policy, model=model) for d, p in zip(demands, hosts, strict=True)]
        seconds[name] = simulate_step(cluster, model, hosts, served, scheduler=name).makespan
    return Iteration(gbit, **seconds)


def judge_iteration(found: Sequence[Iteration]) -> str:
    """How the savings of spraying lie to the claim, how they go with the rate, and where replicas win."""
    saved = {one.gbit: 1 - one.rails / one.ecmp for one in found}
    fits = [f"{gbit:g} Gbit/s" for gbit, share in saved.items() if ITERATION[0] <= share <= ITERATION[1]]
    by_rate = [saved[gbit] for gbit in sorted(saved, reverse=True)]
    slower = either(
        all(a < b for a, b in pairwise(by_rate)),
        "It saves more the slower the nics, the larger the exchange's part of an iteration",
        "It does not save more with slower nics",
    )
    wins = [f"{one.gbit:g}" for one in found if one.auto < one.rails]
    loses = [f"{one.gbit:g}" for one in found if one.auto >= one.rails]
    replicas = f"Replicas of the hot experts take less time than spraying alone at {' and '.join(wins) or 'no'} Gbit/s"
    if loses:
        replicas += (
            f", and not at {' and '.join(loses)} Gbit/s: Mixtral's experts are 352 MB each, and gathering them costs more than it saves "
            f"there (quota, used here, does not weigh that; the planner auto does)"
        )
    return (
        f"RailS claims -{ITERATION[0]:.0%}..{ITERATION[1]:.0%} on Mixtral; spraying alone gives {span([-s for s in saved.values()])} here, "
        f"inside the claim at {' and '.join(fits) or 'none of these rates'}. {slower}. {replicas}. `make run` measures a small model on a "
        f"shaped network of real processes."
    )


def shared_evenly(rows_RE: IntArray, parts: int) -> IntArray:
    """Each expert's rows dealt out to `parts` experts in its place, the remainder to the first of them."""
    cut = np.repeat(rows_RE // parts, parts, axis=1)
    cut += np.arange(parts)[None, :].repeat(rows_RE.shape[1], axis=0).reshape(-1) < np.repeat(
        rows_RE % parts, parts, axis=1
    )
    return cut


RAILS = Paper(
    "rails", "RailS: load balancing by spraying over rails", PAPER,
    {"completion": completion, "symmetry": symmetry, "iteration": iteration},
)  # fmt: skip
