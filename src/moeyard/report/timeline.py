"""The page of one exchange, simulated or measured: how busy every nic is, and when every message crossed."""

from __future__ import annotations

import numpy as np

from moeyard.bounds import bound
from moeyard.report import charts
from moeyard.report.page import Page, Section
from moeyard.timeline import Timeline
from moeyard.units import show_bytes, show_seconds

_SHOWN = 32  # nics of which single messages are shown


def timeline_page(timeline: Timeline) -> Page:
    cluster, traffic = timeline.cluster, timeline.traffic
    least = bound(cluster, traffic)
    origin = {timeline.provenance: ""}
    sections = []
    if cluster.nodes > 1:
        busy = {"out": timeline.rails_out, "in": timeline.rails_in}
        sections.append(
            Section(
                "How busy every nic is", origin, "Share of the time at full rate, until the end; by node and rail.",
                figure=charts.busy_heat(busy, cluster.rails),
            )
        )  # fmt: skip
        sections.append(
            Section(
                "Per-link load", origin, "Seconds that each nic's bytes take at its rate, most loaded first; the end is when all have arrived.",
                figure=charts.link_loads(busy, timeline.makespan),
            )
        )  # fmt: skip
    sections.append(
        Section(
            "Messages", origin, f"Every message between nodes by the nic that sent it, the first {_SHOWN} nics.",
            figure=charts.messages(timeline, most_nics=_SHOWN),
        )
    )  # fmt: skip
    moved = float(traffic.rows.sum() - np.trace(traffic.rows)) * traffic.row_bytes
    return Page(
        title=f"One exchange, scheduler {timeline.scheduler}",
        lead=f"{show_bytes(moved)} between {cluster.num_ranks} ranks on {cluster.name or 'a cluster'}.",
        conditions=[
            (
                "cluster",
                f"{cluster.name or 'cluster'}: {cluster.nodes} nodes x {cluster.ranks_per_node} ranks",
            ),
            ("messages", str(len(timeline.messages))),
            ("bound", show_seconds(least)),
        ],
        sections=sections,
        headlines=[
            (show_seconds(timeline.makespan), "until the last row is there"),
            (f"{timeline.makespan / least if least else 1.0:.3f} x", "the lower bound"),
        ],
        footer="Written by `moeyard simulate --npz`; rebuild with `moeyard report FILE.npz`. Hover over a figure for its values.",
    )
