"""`moeyard schedule CLUSTER TRAFFIC`: schedulers side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from moeyard.cli import complete
from moeyard.cli.show import bars, check_place, console, law, nic_seconds, print_json, table
from moeyard.cluster import Cluster
from moeyard.compare import Candidate, best, compare
from moeyard.formats import ROW_BYTES, load_cluster, load_traffic
from moeyard.formats.clusters import cluster_data
from moeyard.formats.schedules import save_schedule
from moeyard.kernels.build import prepare
from moeyard.provenance import CLOCKED, CLOSED_FORM, data_of
from moeyard.schedulers import SCHEDULERS
from moeyard.traffic import Traffic
from moeyard.units import show_bytes, show_seconds
from moeyard.workloads import workload

_SHOWN_NODES = 16


def run(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER",
            autocompletion=complete.clusters,
            help="A built-in cluster (see `moeyard clusters`) or a TOML file.",
        ),
    ],
    traffic: Annotated[
        str,
        typer.Argument(
            metavar="TRAFFIC",
            autocompletion=complete.workloads,
            help="rows[src, dst] as .npy, .npz or .csv, or a workload: balanced, random, zipf:0.9, zipf-pairs:0.9, hot:0.25, sparse:0.1.",
        ),
    ],
    mb: Annotated[float, typer.Option(help="Megabytes per rank, for a workload.")] = 256.0,
    row_bytes: Annotated[
        int | None, typer.Option(help=f"Bytes of a row; default: what the file says, else {ROW_BYTES}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of a random workload.")] = 0,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=complete.schedulers,
            help=f"Only this one of {', '.join(SCHEDULERS)}; may be repeated.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table and a picture.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the best schedule to this JSON file.")] = None,
) -> None:
    """Compare schedulers on one all-to-all.

    For each: its stages, messages of the busiest nic, estimated time, how many times the lower bound that is, and the
    time to plan it (warm). The picture shows how busy each nic is, under the plainest scheduler and the best.
    """
    check_place("--save", save)
    machines = load_cluster(cluster)
    rows = read_traffic(machines, traffic, mb, row_bytes, seed)
    prepare("schedule")
    candidates = compare(machines, rows, scheduler)
    if save is not None:
        save_schedule(best(candidates).schedule, save)
    if json:
        print_json(_data(machines, rows, candidates))
    else:
        _show(machines, traffic, rows, candidates, save)


def read_traffic(cluster: Cluster, source: str, mb: float, row_bytes: int | None, seed: int) -> Traffic:
    """From a file if it looks like one, else a workload by name."""
    if "." in source.partition(":")[0] or "/" in source:
        return load_traffic(source, row_bytes)
    size = ROW_BYTES if row_bytes is None else row_bytes
    return workload(source, cluster.num_ranks, mb=mb, row_bytes=size, seed=seed)


def _data(cluster: Cluster, traffic: Traffic, candidates: list[Candidate]) -> dict[str, Any]:
    return {
        "cluster": cluster_data(cluster),
        "ranks": cluster.num_ranks,
        "law": law(cluster.contention),
        "row_bytes": traffic.row_bytes,
        "rows": int(traffic.rows.sum()),
        "bound_s": candidates[0].bound,
        "best": best(candidates).scheduler,
        "schedulers": [
            {
                "scheduler": c.scheduler,
                "stages": c.schedule.num_stages,
                "messages_per_nic": c.messages_per_nic,
                "time_s": c.seconds,
                "x_bound": c.x_bound,
                "plan_s": c.plan_seconds,
                "considered": dict(c.schedule.considered),
            }
            for c in candidates
        ],
        "provenance": data_of(
            dict.fromkeys(("bound_s", "time_s", "x_bound", "considered"), CLOSED_FORM) | {"plan_s": CLOCKED}
        ),
    }


def _show(
    cluster: Cluster, source: str, traffic: Traffic, candidates: list[Candidate], save: Path | None
) -> None:
    out = console()
    per_rank = traffic.rows.sum() * traffic.row_bytes / cluster.num_ranks
    out.print(
        f"{cluster.name or 'cluster'}: {cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {cluster.nics_per_node} nics each"
    )
    out.print(f"{source}: {show_bytes(per_rank)} per rank in rows of {traffic.row_bytes} B")
    out.print(f"law: {law(cluster.contention)}; bound: {show_seconds(candidates[0].bound)}")
    winner = best(candidates)
    rows = table("scheduler", ">stages", ">messages per nic", ">time", ">x bound", ">plan time", "")
    for c in candidates:
        rows.add_row(
            c.label,
            str(c.schedule.num_stages),
            str(c.messages_per_nic),
            show_seconds(c.seconds),
            f"{c.x_bound:.3f}",
            show_seconds(c.plan_seconds),
            "<- best" if c is winner else "",
            style="bold" if c is winner else None,
        )
    out.print(rows)
    out.print(f"time, x bound: {CLOSED_FORM}, in closed form; plan time: {CLOCKED}")
    naive = next((c for c in candidates if c.scheduler == "direct"), candidates[0])
    same = naive.schedule.scheduler == winner.schedule.scheduler  # `auto` may choose the plainest
    _picture(out, cluster, [winner] if same else [naive, winner])
    if save is not None:
        out.print(f"saved {winner.label} to {save}")


def _picture(out: Console, cluster: Cluster, shown: list[Candidate]) -> None:
    """How long each nic is busy, out and in, one bar per nic, one line per node, all on one scale."""
    if cluster.nodes == 1:
        return
    busy = [(nic_seconds(cluster, c.sent_NM), nic_seconds(cluster, c.received_NM)) for c in shown]
    most = max(float(side.max()) for pair in busy for side in pair)
    worst = np.max([side.max(axis=1) for pair in busy for side in pair], axis=0)
    nodes = np.sort(np.argsort(-worst, kind="stable")[:_SHOWN_NODES])
    names = [c.scheduler for c in shown]
    rows = table("node", *(f"{name} {side}" for name in names for side in ("out", "in")))
    for node in nodes:
        cells = [bars(side[node], most, cluster.rails[node]) for pair in busy for side in pair]
        rows.add_row(str(node), *cells)
    rows.add_section()
    rows.add_row("max", *(Text(show_seconds(float(side.max()))) for pair in busy for side in pair))
    rows.add_row("mean", *(Text(show_seconds(float(side.mean()))) for pair in busy for side in pair))
    out.print(f"how long each nic is busy (bytes over rate); a full bar is {show_seconds(most)}")
    out.print(rows)
    if len(nodes) < cluster.nodes:
        out.print(f"the {len(nodes)} busiest of {cluster.nodes} nodes")
