"""Placements for counts that are not known yet, on recorded routing: how level the ranks are when the split is exact.

    python -m bench.forecast [--slots 1 2] [--quick] [--document] [--speed] [--traces FOLDER]

Placed on record t - 1 (or on the records up to it), split exactly (policy `quota`) on record t, homes spread evenly. Balancedness:
mean rows of a rank / most rows of a rank, mean over all records and layers. `shadow` serves its own rank's rows, as its paper means
it; the gain over it is the ratio of the slowest ranks, mean over the records of a layer, least over the layers. smartmoe-32 does
not come along: it is read from --traces where it is there. Exit status 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import moeyard as my
from bench.document import write_figures
from moeyard.kernels.place.spare import add_spare
from moeyard.planners.static import static_homes

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
CLUSTERS = {"olmoe-64": "h200-4x8", "mixtral-8": "h200-4x8", "smartmoe-32": "h200-2x8"}
TARGETS = {"olmoe-64": 0.94, "mixtral-8": 0.88, "smartmoe-32": 0.99}  # 2 slots, on one record
PAST = 8  # records of a history
MOVED = (
    1 / 3
)  # share of the rows that go to other experts than in the record before: such a record was not to be foreseen


def place_plain(cluster, history, slots):
    """Every slot to the expert with the most rows per host, on the rank that hosts the least: no exact part, no risk."""
    rows_E = history[-1].rows.sum(axis=0)
    homes = static_homes(len(rows_E), cluster.num_ranks)
    hosts = homes[:, None] == np.arange(cluster.num_ranks)
    add_spare(
        rows_E.astype(float),
        homes,
        np.ones(cluster.num_ranks),
        slots,
        slots * cluster.num_ranks,
        hosts,
    )
    return my.Placement(homes, hosts, "plain")


WAYS = {
    "shadow": lambda cluster, history, slots: my.place(cluster, history[-1], "shadow", slots),
    "quota": lambda cluster, history, slots: my.place(cluster, history[-1], "quota", slots),
    "plain filling": place_plain,
    "ahead, one record": lambda cluster, history, slots: my.place(cluster, history[-1:], "quota", slots),
    "ahead, history": lambda cluster, history, slots: my.place(cluster, history, "quota", slots),
}


class Line(NamedTuple):
    """One trace and number of slots: way -> mean balancedness; the least gain of a layer over `shadow`, by way."""

    trace: str
    slots: int
    balance: dict[str, float]
    late: dict[str, float]  # of the second half of the records, which lie further apart
    gain: dict[str, float]
    guesses: int
    strange: list[
        tuple[int, float, float]
    ]  # record, share of its rows that moved, balancedness on one record
    rest: float  # balancedness on one record of all others
    most: float  # of all, if all others were level


def measure(name, slots, every=1, traces=TRACES):
    """Every `every`-th record of a trace."""
    trace = my.load_trace(str(traces / f"{name}.npz") if name == "smartmoe-32" else name)
    cluster = my.Cluster.load(CLUSTERS[name])
    records = list(range(1, trace.num_records, every))
    even = {way: np.zeros((len(records), trace.num_layers)) for way in WAYS}
    for i, t in enumerate(records):
        for layer in range(trace.num_layers):
            history = [trace.demand(r, layer) for r in range(max(0, t - PAST), t)]
            truth = trace.demand(t, layer)
            for way, plan in WAYS.items():
                served = my.assign(
                    cluster, truth, plan(cluster, history, slots), "own" if way == "shadow" else "quota"
                )
                even[way][i, layer] = served.balancedness(cluster.speed)
    half = np.array(records) >= trace.num_records // 2
    moved = np.array(
        [np.mean([_moved(trace, t, layer) for layer in range(trace.num_layers)]) for t in records]
    )
    one = even["ahead, one record"].mean(axis=1)
    return Line(
        name,
        slots,
        {way: float(one.mean()) for way, one in even.items()},
        {way: float(one[half].mean()) for way, one in even.items()},
        {way: float((one / even["shadow"]).mean(axis=0).min()) for way, one in even.items()},
        len(records) * trace.num_layers,
        [(records[i], float(moved[i]), float(one[i])) for i in np.flatnonzero(moved > MOVED)],
        float(one[moved <= MOVED].mean()),
        float(np.where(moved > MOVED, one, 1.0).mean()),
    )


def _moved(trace, record, layer):
    """Share of the rows that go to other experts than in the record before."""
    now, before = (trace.demand(r, layer).rows.sum(axis=0) for r in (record, record - 1))
    return float(np.abs(now / now.sum() - before / before.sum()).sum() / 2)


def table(lines):
    ways = list(WAYS)
    text = "| trace | slots | " + " | ".join(f"`{w}`" if w in my.PLANNERS else w for w in ways)
    text += " | least gain of a layer over `shadow` |\n|---|---|" + "---|" * len(ways) + "---|\n"
    for line in lines:
        cells = " | ".join(f"{line.balance[w]:.3f} ({line.late[w]:.3f})" for w in ways)
        text += f"| {line.trace} | {line.slots} | {cells} | {line.gain['ahead, history']:.2f} x |\n"
    for line in lines:
        for record, moved, found in line.strange:
            text += (
                f"\n{line.trace}, {line.slots} slots: {moved:.0%} of the rows of record {record} go to other experts than in the one before, which "
                f"nothing foretold: {found:.3f}."
            )
        if line.strange:
            text += f" All other records: {line.rest:.3f}; were those level, all would be {line.most:.3f}.\n"
    return text.rstrip()


def missed(lines):
    """What falls short of the targets."""
    for line in lines:
        one, all_ = line.balance["ahead, one record"], line.balance["ahead, history"]
        if line.slots == 2 and one < TARGETS[line.trace]:
            yield f"{line.trace}: {one:.3f} on one record, target {TARGETS[line.trace]}"
        if line.slots == 2 and all_ < one:
            yield f"{line.trace}: {all_:.4f} with a history, {one:.4f} without"
        for way in ("ahead, one record", "ahead, history"):
            if line.gain[way] < 1:
                yield f"{line.trace}, {line.slots} slots, {way}: a layer gains {line.gain[way]:.2f} x over shadow"


def speed():
    """Processor milliseconds of a placement ahead, warm, 128 experts, 8 records."""
    rng = np.random.default_rng(0)
    for nodes in (4, 16):
        cluster = my.Cluster.load("h200-4x8").but(nodes=nodes, rails=None, speed=None, name=f"{nodes}x8")
        share = rng.permutation(1 / np.arange(1, 129.0))
        history = [
            my.Demand(rng.multinomial(16384, rng.dirichlet(200 * share / share.sum()), cluster.num_ranks))
            for _ in range(PAST)
        ]
        for slots in (1, 2):
            took = []
            for _ in range(30):
                start = time.thread_time()
                my.place(cluster, history, "quota", slots)
                took.append(time.thread_time() - start)
            print(
                f"placed ahead, {nodes}x8, 128 experts, {slots} slots: median {1e3 * np.median(took):.2f} ms, "
                f"least {1e3 * min(took):.2f} ms"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="every fourth record")
    parser.add_argument("--document", action="store_true", help="write the table into docs/placement.md")
    parser.add_argument("--speed", action="store_true", help="time instead")
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help="folder of the traces that do not come along"
    )
    asked = parser.parse_args()
    if asked.speed:
        return speed()
    names = [name for name in CLUSTERS if name != "smartmoe-32" or (asked.traces / f"{name}.npz").exists()]
    if "smartmoe-32" not in names:
        print(f"smartmoe-32 is not in {asked.traces}: left out")
    lines = []
    for name in names:
        for slots in asked.slots:
            lines.append(measure(name, slots, 4 if asked.quick else 1, asked.traces))
            print(
                f"{name}, {slots} slots, {lines[-1].guesses} guesses: "
                + ", ".join(f"{w} {b:.4f}" for w, b in lines[-1].balance.items()),
                flush=True,
            )
    print("\nin brackets: the second half of the records\n" + table(lines))
    if asked.document:
        write_figures("docs/placement.md", "ahead", table(lines))
    short = list(missed(lines))
    for one in short:
        print(f"missed: {one}")
    return sys.exit(bool(short))


if __name__ == "__main__":
    main()
