"""The figures of `moeyard lab bench` as tables."""

from __future__ import annotations

import statistics
from typing import Any

from moeyard.cli.show import console, table
from moeyard.lab.bench import errors
from moeyard.provenance import Provenance
from moeyard.units import show_bandwidth, show_seconds


def show_bench(data: dict[str, Any]) -> None:
    """One for each traffic, under the conditions."""
    out = console()
    for key, value in data["conditions"].items():
        out.print(f"{key}: {value}")
    said = {key: Provenance.read(one, key) for key, one in data["provenance"].items()}
    out.print(f"median, low, high, x bound, busbw: {said['median_s']}; predicted: {said['predicted_s']}")
    for cell in data["traffics"]:
        out.print(f"\n{cell['traffic']}: bound {show_seconds(cell['bound_s'])}")
        rows = table(
            "", ">median", "?>low", "?>high", ">x bound", "?>predicted", "?>error", "?>busbw per rank"
        )
        for one in cell["results"]:
            rows.add_row(*_line(one))
        out.print(rows)
        out.print(cell["note"])
    if found := errors(data):
        out.print(
            f"\npredicted against measured: median error {statistics.median(found):.1%} over {len(found)} cells"
        )


def _line(one: dict[str, Any]) -> tuple[str, ...]:
    guess = one.get("predicted_s")
    return (
        one["scheduler"] + (f" ({one['chosen']})" if one["chosen"] != one["scheduler"] else ""),
        *(show_seconds(one[name]) for name in ("median_s", "low_s", "high_s")),
        f"{one['x_bound']:.2f}",
        show_seconds(guess) if guess else "-",
        f"{guess / one['median_s'] - 1:+.0%}" if guess else "-",
        show_bandwidth(one["busbw"]),
    )
