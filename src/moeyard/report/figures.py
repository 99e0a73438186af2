"""Figures of a run, each from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeyard.arrays import FloatArray
from moeyard.timeline import Timeline

COLOURS = {
    "plain": "#8795a6", "direct": "#3d5a80", "home": "#4fa3a5", "replicas": "#c9a227", "shadow": "#7b5ea7", "prophet": "#a44a3f",
    "sync": "#e07a5f", "chunks": "#6a994e", "serial": "#bc6c25", "all": "#0b7a75", "moeyard": "#0b7a75",
    "domains": "#81b29a", "domains-sync": "#6b705c", "domains+codec": "#c9a227", "auto": "#0b7a75", "auto+codec": "#e07a5f",
}  # fmt: skip
PARTS = {  # of an iteration, in the order they are stacked
    "compute": ("compute", "#9fb4c7"),
    "exchange": ("exchange", "#e07a5f"),
    "wait": ("waiting for the slowest rank", "#f2cc8f"),
    "plan": ("planning", "#81b29a"),
}
NODES = ("#3d5a80", "#e07a5f", "#81b29a", "#c9a227", "#7b5ea7", "#4fa3a5", "#a44a3f", "#6b705c")
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif'


def colour(mode: str) -> str:
    return COLOURS.get(mode, "#3d5a80")


def styled(figure: go.Figure, height: int, *, legend: bool = True) -> go.Figure:
    """One look for all figures."""
    figure.update_layout(
        template="plotly_white", height=height, showlegend=legend, font={"family": _FONT, "size": 13},
        margin={"l": 60, "r": 20, "t": 34, "b": 46}, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"font": {"family": _FONT}},
    )  # fmt: skip
    return figure


def iteration_parts(parts: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """mode -> part -> seconds: where an iteration's time goes, one bar per mode."""
    figure = go.Figure()
    modes = list(parts)
    for part, (label, shade) in PARTS.items():
        seconds = [parts[mode].get(part, 0.0) for mode in modes]
        figure.add_bar(
            y=modes, x=seconds, name=label, orientation="h", marker={"color": shade},
            text=[f"{s:.2f} s" if s > 0.04 * max(sum(p.values()) for p in parts.values()) else "" for s in seconds],
            textposition="inside", insidetextanchor="middle",
            hovertemplate="%{y}: " + label + " %{x:.3f} s<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title="seconds per iteration")
    figure.update_yaxes(autorange="reversed")
    return styled(figure, 120 + 70 * len(modes))


SPANS = {  # kind of span -> (label, colour), in the order of the legend
    "dense": ("attention and the rest", "#b8c7d6"),
    "experts": ("experts", "#3d5a80"),
    "exchange": ("rows exchanged, waiting included", "#e07a5f"),
    "gather": ("replicas gathered and reduced", "#c9a227"),
    "wait": ("waiting for counts", "#f2cc8f"),
    "plan": ("planning", "#81b29a"),
}


def step_spans(spans: Mapping[str, Sequence[Sequence[tuple[str, float, float]]]]) -> go.Figure:
    """mode -> rank -> (kind, begin, end): what every rank did during one step, all modes on one time scale."""
    figure = make_subplots(
        rows=len(spans), cols=1, shared_xaxes=True, subplot_titles=list(spans), vertical_spacing=0.07
    )
    most = max(len(ranks) for ranks in spans.values())
    for row, ranks in enumerate(spans.values(), 1):
        for kind, (label, shade) in SPANS.items():
            found = [(r, b, e) for r, own in enumerate(ranks) for k, b, e in own if k == kind]
            figure.add_bar(
                orientation="h", y=[r for r, _, _ in found], base=[b for _, b, _ in found], x=[e - b for _, b, e in found],
                marker={"color": shade}, width=0.86, name=label, legendgroup=kind, showlegend=row == 1,
                hovertemplate="rank %{y}: " + label + "<br>from %{base:.3f} s, %{x:.3f} s long<extra></extra>", row=row, col=1,
            )  # fmt: skip
        figure.update_yaxes(title="rank", autorange="reversed", dtick=4, row=row, col=1)
    figure.update_layout(barmode="overlay", bargap=0.1)
    figure.update_xaxes(title="seconds since the step began", row=len(spans), col=1)
    figure = styled(figure, 120 + len(spans) * (60 + 13 * most))
    figure.update_layout(legend={"y": 1.06})
    return figure


def over_steps(
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    title: str,
    *,
    events: Sequence[tuple[int, str]] = (),
    zero: bool = False,
    height: int = 300,
) -> go.Figure:
    """One line per mode; events are marked where they happened. Later lines are dashed, so that equal ones show."""
    figure = go.Figure()
    for i, (mode, (steps, values)) in enumerate(series.items()):
        figure.add_scatter(
            x=list(steps), y=list(values), name=mode, mode="lines+markers",
            line={"color": colour(mode), "width": 3 if i == 0 else 2, "dash": "solid" if i == 0 else "dot"},
            marker={"size": 5}, hovertemplate="step %{x}: %{y:.6g}<extra>" + mode + "</extra>",
        )  # fmt: skip
    for step, what in events:
        figure.add_vline(x=step, line={"color": "#c1121f", "dash": "dash", "width": 1.5})
        figure.add_annotation(
            x=step,
            y=1,
            yref="paper",
            text=what,
            showarrow=False,
            xanchor="left",
            yanchor="top",
            font={"color": "#c1121f", "size": 12},
        )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=title, rangemode="tozero" if zero else "normal")
    return styled(figure, height)


def rails_heat(rows: Mapping[str, Mapping[str, FloatArray]], dead: FloatArray | None = None) -> go.Figure:
    """mode -> "out" and "in" -> rows[node, rail], a line of two maps each, all on one colour scale: where the rows crossed."""
    modes = list(rows)
    titles = [
        f"{mode}<br>{'sent' if way == 'out' else 'received'}" for mode in modes for way in ("out", "in")
    ]
    high = 46 * max(len(next(iter(rows.values()))["out"]), 3)
    whole = (high + 80) * len(modes) + 50
    figure = make_subplots(
        rows=len(modes), cols=2, subplot_titles=titles, horizontal_spacing=0.05, vertical_spacing=80 / whole
    )
    figure.update_annotations(font_size=13)  # titles, side by side on a phone
    most = max(float(side.max()) for pair in rows.values() for side in pair.values())
    for line, mode in enumerate(modes, 1):
        for column, way in enumerate(("out", "in"), 1):
            side = np.asarray(rows[mode][way], dtype=float)
            text = [[f"{value:,.0f}" for value in cells] for cells in side]
            if dead is not None and not mode.startswith("plain"):
                text = [
                    ["dead" if dead[n, r] <= 0 else cell for r, cell in enumerate(cells)]
                    for n, cells in enumerate(text)
                ]
            figure.add_heatmap(
                z=side, x=[f"rail {r}" for r in range(side.shape[1])], y=[f"node {n}" for n in range(side.shape[0])],
                zmin=0, zmax=most, colorscale="YlOrRd", text=text, texttemplate="%{text}", xgap=2, ygap=2,
                colorbar={"title": "rows", "thickness": 12}, showscale=(line, column) == (1, 2),
                hovertemplate=mode + " %{y}, %{x}: %{z:,.0f} rows<extra></extra>", row=line, col=column,
            )  # fmt: skip
            figure.update_yaxes(autorange="reversed", showticklabels=column == 1, row=line, col=column)
    return styled(figure, whole, legend=False)


def timelines(planned: Timeline, measured: Timeline, *, most_nics: int = 16) -> go.Figure:
    """Every message between nodes by the nic that sent it: planned as a wide pale bar, measured as a narrow one on it."""
    figure = go.Figure()
    cluster = measured.cluster
    nics = min(cluster.nodes * cluster.nics_per_node, most_nics)
    for what, timeline, width, opacity in (
        ("planned", planned, 0.84, 0.30),
        ("measured", measured, 0.42, 0.95),
    ):
        messages = timeline.messages
        src, dst = np.asarray(messages["src"]), np.asarray(messages["dst"])
        crosses = cluster.node_R[src] != cluster.node_R[dst]
        for node in range(cluster.nodes):
            chosen = np.flatnonzero(
                crosses & (cluster.node_R[dst] == node) & (cluster.port_R[src] < most_nics)
            )
            figure.add_bar(
                orientation="h", y=cluster.port_R[src[chosen]].tolist(),
                base=(timeline.start_M[chosen] * 1e3).tolist(),
                x=((timeline.end_M - timeline.start_M)[chosen] * 1e3).tolist(),
                width=width, opacity=opacity,
                marker={"color": NODES[node % len(NODES)], "line": {"color": "white", "width": 0.6}},
                name=f"to node {node}, {what}", legendgroup=f"node {node}", showlegend=what == "measured",
                customdata=[[int(src[m]), int(dst[m]), int(messages["rows"][m]), int(messages["stage"][m])] for m in chosen],
                hovertemplate=what + ": rank %{customdata[0]} -> %{customdata[1]}, %{customdata[2]} rows, stage "
                "%{customdata[3]}<br>from %{base:.1f} ms, %{x:.1f} ms long<extra></extra>",
            )  # fmt: skip
    for what, timeline, dash in (("planned", planned, "dot"), ("measured", measured, "solid")):
        figure.add_vline(
            x=timeline.makespan * 1e3, line={"color": "#333", "dash": dash, "width": 1.5},
            annotation_text=f"{what} end {timeline.makespan * 1e3:.0f} ms", annotation_position="bottom right" if what == "planned" else "top right",
        )  # fmt: skip
    labels = [
        f"node {i // cluster.nics_per_node} rail {i % cluster.nics_per_node}"
        + (" ✕" if cluster.rails.reshape(-1)[i] <= 0 else "")
        for i in range(nics)
    ]
    figure.update_layout(barmode="overlay", bargap=0.1)
    figure.update_yaxes(tickvals=list(range(nics)), ticktext=labels, autorange="reversed")
    figure.update_xaxes(title="ms since the exchange began", rangemode="tozero")
    figure = styled(figure, 150 + 24 * nics)
    figure.update_layout(margin={"l": 100, "r": 40})
    return figure


def delivered(courses: Sequence[tuple[str, Timeline]], bound: float) -> go.Figure:
    """Megabytes that have arrived between nodes, over time; the bound as a line."""
    figure = go.Figure()
    for name, timeline in courses:
        node = timeline.cluster.node_R
        crosses = node[np.asarray(timeline.messages["src"])] != node[np.asarray(timeline.messages["dst"])]
        end = timeline.end_M[crosses]
        size = np.asarray(timeline.messages["rows"])[crosses] * timeline.traffic.row_bytes / 1e6
        order = np.argsort(end, kind="stable")
        mode = name.split(",")[0]
        planned = "planned" in name
        figure.add_scatter(
            x=[0.0, *(end[order] * 1e3)], y=[0.0, *np.cumsum(size[order])], name=name, mode="lines",
            line={"color": colour(mode), "width": 2.5, "dash": "dot" if planned else "solid", "shape": "hv"},
            hovertemplate="%{y:.2f} MB after %{x:.0f} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.add_vline(
        x=bound * 1e3, line={"color": "#c1121f", "dash": "dash", "width": 1.5},
        annotation_text=f"bound {bound * 1e3:.0f} ms", annotation_position="bottom left",
    )  # fmt: skip
    figure.update_xaxes(title="ms since the exchange began", rangemode="tozero")
    figure.update_yaxes(title="MB arrived between nodes")
    return styled(figure, 320)


def grouped_bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    title: str,
    *,
    errors: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
    colours: Mapping[str, str] | None = None,
    line: tuple[float, str] | None = None,
    height: int = 360,
) -> go.Figure:
    """One group of bars per name, one bar per series; `errors`: (low, high) of each."""
    figure = go.Figure()
    for i, (name, values) in enumerate(series.items()):
        bars = (errors or {}).get(name)
        figure.add_bar(
            x=list(groups), y=list(values), name=name, marker={"color": (colours or {}).get(name, NODES[i % len(NODES)])},
            error_y=None if bars is None else {
                "type": "data", "symmetric": False, "thickness": 1,
                "array": [0 if b is None or v is None else b[1] - v for b, v in zip(bars, values, strict=True)],
                "arrayminus": [0 if b is None or v is None else v - b[0] for b, v in zip(bars, values, strict=True)],
            },
            hovertemplate="%{x}, " + name + ": %{y:.4g}<extra></extra>",
        )  # fmt: skip
    if line is not None:
        figure.add_hline(
            y=line[0], line={"color": "#c1121f", "dash": "dash", "width": 1.5}, annotation_text=line[1]
        )
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_yaxes(title=title, rangemode="tozero")
    return styled(figure, height)
