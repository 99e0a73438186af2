"""Figures that pages of replays, simulations and comparisons share, each from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeyard.arrays import FloatArray
from moeyard.breakeven import Grid
from moeyard.report.figures import styled
from moeyard.sim.step import StepTimeline
from moeyard.timeline import Timeline
from moeyard.units import show_bandwidth, show_bytes

# Okabe and Ito's colours, told apart by people who see no red or green; the fourth and later lines are dashed as well.
SAFE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_DASHES = ("solid", "dash", "dot", "dashdot")
_HEAT = "Viridis"
_OPERATORS = (  # of a step, each with a colour of its own in all figures; the backward ones are hatched
    "non_moe", "router", "dispatch", "experts", "combine", "gather", "reduce", "plan",
    "non_moe_backward", "combine_backward", "dispatch_backward", "experts_backward",
)  # fmt: skip


def lines(
    series: Mapping[str, tuple[Sequence[int], Sequence[float | None]]],
    title: str,
    *,
    zero: bool = False,
    height: int = 300,
) -> go.Figure:
    """One line each over the steps of a trace or run."""
    figure = go.Figure()
    for i, (name, (steps, values)) in enumerate(series.items()):
        figure.add_scatter(
            x=list(steps), y=list(values), name=name, mode="lines+markers", marker={"size": 4, "symbol": i % 8},
            line={"color": SAFE[i % len(SAFE)], "width": 2, "dash": _DASHES[(i // 3) % len(_DASHES)]},
            hovertemplate="step %{x}: %{y:.5g}<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=title, rangemode="tozero" if zero else "normal")
    return styled(figure, height + 22 * (len(series) // 4))


def busy_heat(busy: Mapping[str, FloatArray], live: FloatArray) -> go.Figure:
    """ "out" and "in" -> share of the time [node, rail]; dead nics are marked."""
    figure = make_subplots(rows=1, cols=len(busy), subplot_titles=list(busy), horizontal_spacing=0.08)
    for column, (way, side) in enumerate(busy.items(), 1):
        text = [
            [
                "dead" if live[n, r] <= 0 else f"{value:.0%}" if side.size <= 256 else ""
                for r, value in enumerate(line)
            ]
            for n, line in enumerate(side)
        ]
        figure.add_heatmap(
            z=side, x=[f"rail {r}" for r in range(side.shape[1])], y=[f"node {n}" for n in range(side.shape[0])],
            zmin=0, zmax=1, colorscale=_HEAT, text=text, texttemplate="%{text}", xgap=1, ygap=1,
            showscale=column == len(busy), colorbar={"title": "busy", "thickness": 12, "tickformat": ".0%"},
            hovertemplate=way + " %{y}, %{x}: %{z:.1%}<extra></extra>", row=1, col=column,
        )  # fmt: skip
        figure.update_yaxes(autorange="reversed", showticklabels=column == 1, row=1, col=column)
    return styled(figure, 120 + 26 * max(4, min(len(side), 40)), legend=False)


def rank_heat(steps: Sequence[int], rows: Mapping[str, FloatArray]) -> go.Figure:
    """name -> rows [record, rank] over the record's mean, one map below the other on one scale."""
    shares = {}
    for name, one in rows.items():
        mean = one.mean(axis=1, keepdims=True)
        shares[name] = np.divide(one, mean, out=np.zeros_like(one), where=mean > 0)
    most = max(2.0, *(float(one.max()) for one in shares.values()))
    figure = make_subplots(
        rows=len(rows),
        cols=1,
        subplot_titles=list(rows),
        shared_xaxes=True,
        vertical_spacing=0.25 / max(2, len(rows)),
    )
    for i, (name, share) in enumerate(shares.items(), 1):
        figure.add_heatmap(
            z=share.T, x=[str(step) for step in steps], zmin=0, zmax=most, colorscale=_HEAT, showscale=i == 1,
            colorbar={"title": "x mean", "thickness": 12},
            hovertemplate=name + ", step %{x}, rank %{y}: %{z:.2f} x the mean<extra></extra>", row=i, col=1,
        )  # fmt: skip
        figure.update_yaxes(title="rank", autorange="reversed", row=i, col=1)
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="step", row=len(rows), col=1)
    return styled(figure, 90 + 190 * len(rows), legend=False)


def link_loads(busy: Mapping[str, FloatArray], makespan: float) -> go.Figure:
    """Seconds that each nic is busy, sorted, out and in."""
    figure = go.Figure()
    for i, (way, side) in enumerate(busy.items()):
        figure.add_scatter(
            y=(np.sort(side.ravel())[::-1] * makespan * 1e3).tolist(), name=way, mode="lines+markers", marker={"size": 4, "symbol": i},
            line={"color": SAFE[i], "width": 2, "dash": _DASHES[i]}, hovertemplate="nic no. %{x}: %{y:.4g} ms<extra>" + way + "</extra>",
        )  # fmt: skip
    figure.add_hline(
        y=makespan * 1e3, line={"color": SAFE[7], "dash": "dash", "width": 1.5}, annotation_text="end"
    )
    figure.update_xaxes(title="nics, most loaded first")
    figure.update_yaxes(title="ms busy", rangemode="tozero")
    return styled(figure, 300)


def messages(timeline: Timeline, *, most_nics: int) -> go.Figure:
    """Every message between nodes by the nic that sent it, coloured by where it goes."""
    cluster, table = timeline.cluster, timeline.messages
    figure = go.Figure()
    src, dst = np.asarray(table["src"]), np.asarray(table["dst"])
    across = (cluster.node_R[src] != cluster.node_R[dst]) & (cluster.port_R[src] < most_nics)
    for node in range(cluster.nodes):
        chosen = np.flatnonzero(across & (cluster.node_R[dst] == node))
        if len(chosen):
            figure.add_bar(
                orientation="h", y=cluster.port_R[src[chosen]].tolist(), base=(timeline.start_M[chosen] * 1e3).tolist(),
                x=((timeline.end_M - timeline.start_M)[chosen] * 1e3).tolist(), name=f"to node {node}",
                opacity=0.85, marker={"color": SAFE[node % len(SAFE)], "line": {"color": "white", "width": 0.4}}, showlegend=cluster.nodes <= 16,
                customdata=np.stack([src[chosen], dst[chosen], np.asarray(table["rows"])[chosen]], axis=1).tolist(),
                hovertemplate="rank %{customdata[0]} -> %{customdata[1]}, %{customdata[2]} rows<br>from %{base:.4g} ms, %{x:.4g} ms long<extra></extra>",
            )  # fmt: skip
    nics = min(most_nics, cluster.nodes * cluster.nics_per_node)
    labels = [f"node {i // cluster.nics_per_node} rail {i % cluster.nics_per_node}" for i in range(nics)]
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_yaxes(tickvals=list(range(nics)), ticktext=labels, autorange="reversed")
    figure.update_xaxes(title="ms since the exchange began", rangemode="tozero")
    figure = styled(figure, 130 + 20 * nics)
    figure.update_layout(margin={"l": 100})
    return figure


def bars(labels: Sequence[str], values: Sequence[float], title: str) -> go.Figure:
    """One bar a label, longest readable first."""
    figure = go.Figure()
    figure.add_bar(
        orientation="h", y=list(labels), x=list(values), marker={"color": SAFE[0]}, text=[f"{v:.4g}" for v in values],
        hovertemplate="%{y}: %{x:.5g}<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title=title, rangemode="tozero")
    return styled(figure, 120 + 34 * len(labels), legend=False)


def step_lanes(timeline: StepTimeline) -> go.Figure:
    """One bar an operator, a lane a resource: what hides behind what."""
    figure = go.Figure()
    start, end = timeline.start_OR.min(axis=1), timeline.end_OR.max(axis=1)
    for i, name in enumerate(_OPERATORS):
        own = [o for o, op in enumerate(timeline.operators) if op.name == name and end[o] > start[o]]
        if own:
            figure.add_bar(
                orientation="h", y=[timeline.operators[o].resource for o in own], base=(start[own] * 1e3).tolist(),
                x=((end - start)[own] * 1e3).tolist(), name=name.replace("_", " "), opacity=0.85,
                marker={"color": SAFE[i % len(SAFE)], "line": {"color": "white", "width": 0.4}, "pattern": {"shape": "/" if i >= len(SAFE) else ""}},
                customdata=[timeline.operators[o].layer for o in own],
                hovertemplate=name + ", layer %{customdata}<br>from %{base:.4g} ms, %{x:.4g} ms long<extra></extra>",
            )  # fmt: skip
    figure.update_layout(barmode="overlay", bargap=0.3)
    figure.update_xaxes(title="ms since the step began", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return styled(figure, 300)


def break_even(grid: Grid) -> go.Figure:
    """What is saved, by colour and in numbers; blue saves, orange costs."""
    figure = go.Figure()
    x, y = (
        [_amount(name, value) for value in side]
        for name, side in ((grid.x_name, grid.x), (grid.y_name, grid.y))
    )
    figure.add_heatmap(
        z=grid.saving_YX, x=x, y=y, zmid=0, zmin=-1, zmax=1, colorscale=[[0, SAFE[1]], [0.5, "#f2f2f2"], [1, SAFE[0]]],
        text=[[f"{value:z.0%}" for value in line] for line in grid.saving_YX], texttemplate="%{text}", xgap=2, ygap=2,
        colorbar={"title": "saved", "thickness": 12, "tickformat": ".0%"},
        hovertemplate="%{x} " + grid.x_name + ", %{y} " + grid.y_name + ": %{z:.1%}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title=grid.x_name, type="category")
    figure.update_yaxes(title=grid.y_name, type="category")
    return styled(figure, 360, legend=False)


def strategy_map(
    panels: Mapping[str, Sequence[tuple[str, str, str, float]]], x_name: str, y_name: str
) -> go.Figure:
    """{title: (x, y, who wins, how many times longer plain takes)}: who wins in words and numbers, by how much as a colour; a panel below
    the other, so that a phone shows the words too, all on one scale."""
    figure = make_subplots(
        rows=len(panels), cols=1, subplot_titles=list(panels), vertical_spacing=0.4 / len(panels)
    )
    most = max(np.log2(max(ratio, 1.0)) for places in panels.values() for *_, ratio in places)
    for row, places in enumerate(panels.values(), 1):
        x, y = list(dict.fromkeys(one[0] for one in places)), list(dict.fromkeys(one[1] for one in places))
        told = {(one[0], one[1]): (one[2], one[3]) for one in places}
        text = [[f"{told[a, b][0]}<br>{told[a, b][1]:.2f} x" for a in x] for b in y]
        figure.add_heatmap(
            z=[[np.log2(max(told[a, b][1], 1.0)) for a in x] for b in y], x=x, y=y, zmin=0, zmax=most, text=text,
            colorscale=[[0, "#f2f2f2"], [1, SAFE[0]]], texttemplate="%{text}", xgap=2, ygap=2, showscale=False,
            hovertemplate="%{x} " + x_name + ", %{y} " + y_name + ": %{text}<extra></extra>", row=row, col=1,
        )  # fmt: skip
        figure.update_xaxes(title=x_name if row == len(panels) else None, type="category", row=row, col=1)
        figure.update_yaxes(title=y_name, type="category", row=row, col=1)
    return styled(figure, 90 + 230 * len(panels), legend=False)


def _amount(name: str, value: float) -> str:
    """As people say it; the axis has the name."""
    if name.startswith("bytes/s"):
        return show_bandwidth(value)
    return show_bytes(value) if name.startswith("bytes") else f"{value:,.0f}"
