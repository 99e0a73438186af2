"""Exchanges in a lab, method against method, measured beside predicted."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from moeyard.bounds import bound
from moeyard.cluster import Cluster
from moeyard.lab.launch import Net, run
from moeyard.lab.loads import lab_traffic
from moeyard.lab.predict import predict, predict_gloo
from moeyard.lab.spec import LabSpec
from moeyard.provenance import CLOSED_FORM, SIMULATED, Network, Provenance, data_of
from moeyard.schedulers import schedule
from moeyard.traffic import Traffic
from moeyard.units import show_bandwidth

GLOO = "gloo"
METHODS = (GLOO, "direct", "ecmp", "spread", "rails", "shot", "fast", "auto")
ROW_BYTES = 2048


def bench(
    spec: str | LabSpec | Cluster,
    traffics: Sequence[str],
    methods: Sequence[str] = METHODS,
    *,
    mb: float = 45.0,
    row_bytes: int = ROW_BYTES,
    repeat: int = 7,
    calibrated: Cluster | None = None,
    network: Net = "auto",
    timeout: float = 120.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Every method on every traffic, `repeat` times in turn; a table as `report.bench_page` takes it.

    Bounds are of the lab's rates (payload); predictions of `calibrated`, if given. Plans are made for `calibrated` too,
    since that is what a user who has calibrated plans for.
    """
    lab = LabSpec.load(spec)
    planned = calibrated or lab.seen
    loads = {name: lab_traffic(lab.cluster, name, mb, row_bytes, seed) for name in traffics}
    cells = [(name, traffic.rows, traffic.row_bytes) for name, traffic in loads.items()]
    arguments = {
        "cells": cells,
        "methods": list(methods),
        "repeat": repeat,
        "timeout": timeout,
        "cluster": planned,
    }
    found = run(
        lab, "moeyard.lab.cells:measure_cells", arguments, network=network, show="first", name=f"bench{os.getpid()}"
    )[0]  # fmt: skip
    return {
        "title": "All-to-all in the lab, measured and predicted",
        "conditions": conditions(lab, mb, row_bytes, repeat, calibrated is not None),
        "repeat": repeat,
        "provenance": data_of(origins(Network(found["network"]))),
        "traffics": [
            _cell(lab, planned, name, loads[name], found, calibrated is not None) for name in traffics
        ],
    }


def origins(network: Network) -> dict[str, Provenance]:
    """Where each figure of a benchmark comes from."""
    measured = ("seconds", "median_s", "low_s", "high_s", "x_bound", "busbw")
    return dict.fromkeys(measured, Provenance.measured(network)) | {
        "bound_s": CLOSED_FORM,
        "predicted_s": SIMULATED,
    }


def conditions(lab: LabSpec, mb: float, row_bytes: int, repeat: int, calibrated: bool) -> dict[str, str]:
    c = lab.cluster
    return {
        "lab": f"{c.nodes} nodes x {c.ranks_per_node} ranks, {c.nics_per_node} rails of {show_bandwidth(c.scale_out.bandwidth)} each",
        "machine": f"{len(os.sched_getaffinity(0))} cores for {c.num_ranks} ranks",
        "rows": f"{mb:g} MB between nodes in all, rows of {row_bytes} bytes; rows inside nodes on top",
        "time": f"first start to last end, median of {repeat} interleaved repetitions; splits and plan known",
        "bound": "of the rails' payload rate, 1448/1514 of the wire's",
        "plans and predictions": "for the calibrated cluster" if calibrated else "for the nominal cluster",
    }


def _cell(
    lab: LabSpec, planned: Cluster, name: str, traffic: Traffic, found: dict[str, Any], predicts: bool
) -> dict[str, Any]:
    least = bound(lab.seen, traffic)
    moved = float(traffic.rows.sum() - traffic.rows.diagonal().sum()) * traffic.row_bytes
    results = []
    for method, seconds in found["seconds"][name].items():
        middle = statistics.median(seconds)
        result = {
            "scheduler": method,
            "chosen": found["chosen"][name][method],
            "median_s": middle,
            "low_s": min(seconds),
            "high_s": max(seconds),
            "seconds": seconds,
            "x_bound": middle / least,
            "busbw": moved / middle / traffic.num_ranks,
        }
        if predicts:
            result["predicted_s"] = predicted(planned, traffic, method)
        results.append(result)
    return {"traffic": name, "bound_s": least, "note": _note(results), "results": results}


def predicted(cluster: Cluster, traffic: Traffic, method: str) -> float:
    """Seconds that the simulator expects, messages on the rails that really carry them."""
    if method == GLOO:
        return predict_gloo(cluster, traffic)
    return predict(cluster, schedule(cluster, traffic, method))


def ratios(results: list[dict[str, Any]], method: str = "auto") -> dict[str, float]:
    """How many times longer each other method took than `method`, by medians."""
    time = {r["scheduler"]: r["median_s"] for r in results}
    return {name: s / time[method] for name, s in time.items() if name != method} if method in time else {}


def _note(results: list[dict[str, Any]]) -> str:
    against = ratios(results)
    if not against:
        return ""
    parts = [
        f"{x:.2f} x faster than {name}" for name, x in against.items() if name in (GLOO, "direct", "ecmp")
    ]
    text = f"auto: {', '.join(parts)}" if parts else ""
    if "ecmp" in against:
        more, less = against["ecmp"] - 1, 1 - 1 / against["ecmp"]
        text += f"; over ecmp: bus bandwidth {more:+.0%}, completion time {-less:+.0%} (RailS claims +20..78%, -17..78%)"
    return text


def errors(data: dict[str, Any]) -> list[float]:
    """|predicted / measured - 1| of every cell and method."""
    return [
        abs(r["predicted_s"] / r["median_s"] - 1)
        for cell in data["traffics"]
        for r in cell["results"]
        if "predicted_s" in r
    ]
