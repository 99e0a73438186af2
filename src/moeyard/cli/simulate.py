"""`moeyard simulate CLUSTER TRAFFIC`: what an exchange would cost on that cluster."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from moeyard.bounds import bound
from moeyard.cli import complete
from moeyard.cli.schedule import read_traffic
from moeyard.cli.show import Waiting, bars, check_place, console, law, print_json, table
from moeyard.cluster import Cluster
from moeyard.errors import MoeyardError
from moeyard.formats import ROW_BYTES, load_cluster
from moeyard.formats.clusters import cluster_data
from moeyard.kernels.build import prepare
from moeyard.provenance import CLOCKED, CLOSED_FORM, SIMULATED, data_of
from moeyard.schedule import Schedule
from moeyard.schedulers import SCHEDULERS
from moeyard.schedulers import schedule as make_schedule
from moeyard.sim.flow import AUTO, Tolerance, simulate, warm_simulator
from moeyard.sim.sweep import Outcome, Point, peak_memory, sweep
from moeyard.timeline import Timeline
from moeyard.units import show_bandwidth, show_bytes, show_seconds
from moeyard.workers import BACKENDS, check_backend

_SHOWN_NODES = 16
_SHOWN_CHAIN = 8
_SWEPT = data_of(
    dict.fromkeys(("seconds", "x_bound", "busbw", "rail_mean", "rail_max"), SIMULATED)
    | {"bound": CLOSED_FORM, "wall": CLOCKED, "memory": CLOCKED}
)


def run(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER",
            autocompletion=complete.several_clusters,
            help="A built-in cluster or a TOML file; several, with commas between, are swept.",
        ),
    ],
    traffic: Annotated[
        str,
        typer.Argument(
            metavar="TRAFFIC",
            autocompletion=complete.workloads,
            help="rows[src, dst] as .npy, .npz or .csv, or a workload: balanced, random, zipf:0.9, zipf-pairs:0.9, hot:0.25, "
            "sparse:0.1; several, with commas between, are swept.",
        ),
    ],
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=complete.schedulers,
            help=f"Of {', '.join(SCHEDULERS)}; default auto; may be repeated.",
        ),
    ] = None,
    mb: Annotated[
        list[float] | None, typer.Option(help="Megabytes per rank, for a workload; may be repeated.")
    ] = None,
    row_bytes: Annotated[
        int | None, typer.Option(help=f"Bytes of a row; default: what the file says, else {ROW_BYTES}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of a random workload.")] = 0,
    tolerance: Annotated[
        str,
        typer.Option(
            help="0: exact. 0.005: faster with many flows, within 0.5%. auto: exact for few flows, within 2% for the most."
        ),
    ] = AUTO,
    jobs: Annotated[int, typer.Option(min=0, help="Processes for a sweep; 0: one per core.")] = 0,
    backend: Annotated[
        str,
        typer.Option(
            autocompletion=complete.these(*BACKENDS),
            help=f"Where those of a sweep run: {', '.join(BACKENDS)}; dask:ADDRESS or ray:ADDRESS for a cluster.",
        ),
    ] = "loky",
    chrome: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
    npz: Annotated[Path | None, typer.Option(help="Write the timeline.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables and a picture.")] = False,
) -> None:
    """Simulate an exchange on a cluster: time, times the lower bound, how busy every rail is.

    Several clusters, workloads, sizes or schedulers make a sweep: a table with one line each, worked out in parallel.
    """
    wanted = _tolerance(tolerance)
    check_backend(backend)
    check_place("--npz", npz)
    check_place("--chrome", chrome)
    for what, names in (("cluster", cluster), ("traffic", traffic)):
        if not all(names.split(",")):
            raise MoeyardError(f"{what} {names!r} has an empty name beside a comma; leave the comma out")
    points = [
        Point(machines, f"{source} {size:g} MB", read_traffic(machines, source, size, row_bytes, seed), name)
        for machines in map(_named, cluster.split(","))
        for source in traffic.split(",")
        for size in mb or [256.0]
        for name in scheduler or ["auto"]
    ]
    prepare("simulate")  # before any clock runs
    if len(points) > 1:
        if chrome or npz:
            raise MoeyardError(
                f"--chrome and --npz write one timeline, but these are {len(points)} simulations; ask for one"
            )
        _sweep(points, wanted, jobs or os.cpu_count() or 1, backend, json)
        return
    point = points[0]
    plan = make_schedule(point.cluster, point.traffic, point.scheduler)
    warm_simulator(plan)
    began = time.perf_counter()
    timeline = simulate_watched(point.cluster, plan, wanted)
    wall = time.perf_counter() - began
    if chrome:
        timeline.to_chrome(chrome)
    if npz:
        timeline.save(npz)
    if json:
        print_json(_data(point, plan, timeline, wall))
    else:
        _show(point, plan, timeline, wall)
        for path in filter(None, (chrome, npz)):
            print(f"written to {path}")


def _tolerance(text: str) -> Tolerance:
    if text == AUTO:
        return AUTO
    try:
        return float(text)
    except ValueError:
        raise MoeyardError(
            f"--tolerance {text}: give {AUTO}, or a number of at least 0 and below 1"
        ) from None


def simulate_watched(cluster: Cluster, plan: Schedule, tolerance: Tolerance = 0.0) -> Timeline:
    """Simulate in a thread of its own, with a progress bar on stderr once it takes long. Ctrl-C stops it."""
    watch = np.zeros(3)  # done, stop, of how many
    result: list[Timeline | Exception] = []

    def work() -> None:
        try:
            result.append(simulate(cluster, plan, tolerance=tolerance, watch=watch))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        thread.join(1.0)
        if thread.is_alive():
            with Waiting("operations", 1) as waiting:
                while thread.is_alive():
                    thread.join(0.2)
                    waiting.update(watch[0], total=watch[2] or None)
    except KeyboardInterrupt:
        watch[1] = 1.0
        raise
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def _named(source: str) -> Cluster:
    machines = load_cluster(source)
    return machines if machines.name else machines.but(name=Path(source).stem)


def _sweep(points: list[Point], tolerance: Tolerance, jobs: int, backend: str, json: bool) -> None:
    outcomes: list[Outcome] = []
    with Waiting("simulations", len(points)) as waiting:
        for outcome in sweep(points, tolerance=tolerance, jobs=min(jobs, len(points)), backend=backend):
            outcomes.append(outcome)
            waiting.update(len(outcomes))
    if json:
        more = {"provenance": _SWEPT}
        print_json([dataclasses.asdict(o) | {"x_bound": o.x_bound} | more for o in outcomes])
        return
    rows = table(
        "cluster", "traffic", "scheduler", "?>stages", "?>messages", ">time", ">x bound", "?>busbw",
        "?>rails", "?>worked", "?>memory",
    )  # fmt: skip
    for o, point in zip(outcomes, points, strict=True):
        name = o.scheduler if o.scheduler == point.scheduler else f"{point.scheduler} ({o.scheduler})"
        rows.add_row(
            o.cluster, o.traffic, name, str(o.stages), str(o.messages), show_seconds(o.seconds), f"{o.x_bound:.3f}",
            show_bandwidth(o.busbw), f"{o.rail_mean:.0%}", show_seconds(o.wall), show_bytes(o.memory),
        )  # fmt: skip
    console().print(rows)
    console().print(_mode(max(o.tolerance for o in outcomes)))


def _mode(tolerance: float) -> str:
    """The error of a makespan, as people say it."""
    if tolerance == 0:
        return "exact simulation"
    return f"within {100 * tolerance:.2g}%"


def _data(point: Point, plan: Schedule, timeline: Timeline, wall: float) -> dict[str, Any]:
    least = bound(point.cluster, point.traffic)
    return {
        "cluster": cluster_data(point.cluster),
        "traffic": point.label,
        "scheduler": plan.scheduler,
        "law": law(point.cluster.contention),
        "stages": plan.num_stages,
        "messages": len(timeline.messages),
        "time_s": timeline.makespan,
        "bound_s": least,
        "x_bound": timeline.makespan / least if least else 1.0,
        "algbw": timeline.algbw,
        "busbw": timeline.busbw,
        "rails_out": timeline.rails_out.tolist(),
        "rails_in": timeline.rails_in.tolist(),
        "wan_out": timeline.wan_out.tolist(),
        "critical_path": [
            {name: int(timeline.messages[name][m]) for name in ("stage", "src", "dst", "rows")}
            | {"start_s": float(timeline.start_M[m]), "end_s": float(timeline.end_M[m])}
            for m in timeline.critical_path.tolist()
        ],
        "tolerance": timeline.tolerance,
        "within_percent": 100 * timeline.tolerance,
        "simulated_operations": timeline.kinds,
        "sharings": timeline.sharings,
        "wall_s": wall,
        "memory_bytes": peak_memory(),
        "provenance": data_of(
            dict.fromkeys(("time_s", "x_bound", "algbw", "busbw", "rails_out", "rails_in", "wan_out"), timeline.provenance)
            | {"critical_path": timeline.provenance, "bound_s": CLOSED_FORM, "wall_s": CLOCKED, "memory_bytes": CLOCKED}
        ),
    }  # fmt: skip


def _show(point: Point, plan: Schedule, timeline: Timeline, wall: float) -> None:
    out, cluster = console(), point.cluster
    least = bound(cluster, point.traffic)
    out.print(
        f"{cluster.name or 'cluster'}: {cluster.nodes} nodes x {cluster.ranks_per_node} ranks, "
        f"{cluster.nics_per_node} nics each; law: {law(cluster.contention)}"
    )
    out.print(
        f"{point.label}, scheduler {plan.scheduler}: {plan.num_stages} stages, {len(timeline.messages)} messages"
    )
    ratio = timeline.makespan / least if least else 1.0
    out.print(
        f"time {show_seconds(timeline.makespan)} ({_mode(timeline.tolerance)}) = {ratio:.3f} x bound ({show_seconds(least)}); busbw "
        f"{show_bandwidth(timeline.busbw)}, algbw {show_bandwidth(timeline.algbw)} per rank"
    )
    _picture(out, timeline)
    _chain(out, timeline)
    out.print(
        f"simulated {timeline.kinds} operations, links shared {timeline.sharings} times, "
        f"{show_seconds(wall)}, memory {show_bytes(peak_memory())}"
    )


def _picture(out: Console, timeline: Timeline) -> None:
    """Utilisation of every nic, one bar each, one line per node."""
    cluster = timeline.cluster
    if cluster.nodes == 1:
        return
    sides = (timeline.rails_out, timeline.rails_in)
    worst = np.maximum(*(side.max(axis=1) for side in sides))
    nodes = np.sort(np.argsort(-worst, kind="stable")[:_SHOWN_NODES])
    rows = table("node", "out", "in", ">out mean", ">in mean")
    for node in nodes:
        cells = [bars(side[node], 1.0, cluster.rails[node]) for side in sides]
        rows.add_row(str(node), *cells, *(f"{side[node].mean():.0%}" for side in sides))
    rows.add_section()
    means = [bars(side.mean(axis=0), 1.0, cluster.rails.max(axis=0)) for side in sides]
    rows.add_row("rails", *means, *(Text(f"{side.mean():.0%}") for side in sides))
    out.print("how busy each nic is until the end; a full bar is all the time at full rate")
    out.print(rows)
    if len(nodes) < cluster.nodes:
        out.print(f"the {len(nodes)} busiest of {cluster.nodes} nodes")
    if timeline.wan_out.size:
        out.print(
            f"wan ports: {timeline.wan_out.mean():.0%} busy on average, {timeline.wan_out.max():.0%} at most"
        )


def _chain(out: Console, timeline: Timeline) -> None:
    chain = timeline.critical_path.tolist()
    if not chain:
        return
    shown = (
        chain
        if len(chain) <= _SHOWN_CHAIN
        else [*chain[: _SHOWN_CHAIN // 2], -1, *chain[-_SHOWN_CHAIN // 2 :]]
    )
    src, dst = timeline.messages["src"], timeline.messages["dst"]
    steps = [
        "..." if m < 0 else f"{src[m]}->{dst[m]} {show_seconds(float(timeline.end_M[m]))}" for m in shown
    ]
    out.print(f"critical path ({len(chain)} messages, each with its end): " + ", ".join(steps))
