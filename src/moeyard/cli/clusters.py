"""`moeyard clusters`: what comes with the package."""

from __future__ import annotations

from typing import Annotated

import typer

from moeyard.cli.show import console, law, print_json, table
from moeyard.formats.clusters import cluster_data, preset_names, read_cluster_file
from moeyard.units import show_bandwidth, show_seconds


def run(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the built-in clusters."""
    presets = {name: read_cluster_file(name) for name in preset_names()}
    if json:
        print_json({name: cluster_data(c) | {"description": text} for name, (c, text) in presets.items()})
        return
    rows = table("name", ">nodes x ranks", "?>nics", "?>scale-up", ">scale-out", "?>latency", "?description")
    for name, (c, text) in presets.items():
        rows.add_row(
            name,
            f"{c.nodes} x {c.ranks_per_node}",
            str(c.nodes * c.nics_per_node),
            show_bandwidth(c.scale_up.bandwidth),
            show_bandwidth(c.scale_out.bandwidth),
            show_seconds(c.scale_out.latency),
            f"{text}; law: {law(c.contention)}" if c.contention.loss else text,
        )
    console().print(rows)
