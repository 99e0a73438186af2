"""The page of a training run: comparison first, then where the time and the rows went, then the curves."""

from __future__ import annotations

import math

import numpy as np

from moeyard.bounds import bound
from moeyard.provenance import Network, Provenance, Source, by_source
from moeyard.report import figures
from moeyard.report.attribution import COLUMNS, attribution, hidden, prediction_error, table_rows
from moeyard.report.load import Mode, Run, loss_gap, told_of_codecs
from moeyard.report.page import Page, Section
from moeyard.timeline import Timeline
from moeyard.units import show_seconds


def run_page(run: Run) -> Page:
    """Comparison first, then where the time and the rows went, then the curves."""
    sections = [_comparison(run), *_attribution(run), _parts(run)]
    spans = {mode.name: mode.spans for mode in run.modes if mode.spans}
    if spans:
        note = "The last step of each mode, on one time scale. An exchange lasts until a rank has all its rows, so it includes waiting for others."
        sections.append(
            Section("One step, rank by rank", _origins(run, "spans"), note, figure=figures.step_spans(spans))
        )
    if any("rows_per_rail" in mode.summary for mode in run.modes):
        sections.append(_rails(run))
    if any("wan_bytes" in mode.summary for mode in run.modes):
        sections.append(_wan(run))
    sections += _exchanges(run)
    events = [(int(e["step"]), str(e["event"])) for mode in run.modes for e in mode.events]
    if events:
        sections.append(_events(run))
    sections += _curves(run, events)
    names = " and ".join(mode.name for mode in run.modes)
    return Page(
        title=run.title,
        lead=f"The same model, text and routing, trained with {names}. {_lead(run)}",
        conditions=list(run.conditions.items()),
        sections=sections,
        headlines=_headlines(run),
        footer="Written by `moeyard train`; rebuild with `moeyard report FOLDER`. Hover over a figure for its values.",
    )


WHERE = {
    Network.SHAPED: "Real bytes crossed a shaped network on one machine.",
    Network.LOOPBACK: "All ranks were on one machine and its network was not shaped: exchange times are those of its memory.",
    Network.CLUSTER: "Real bytes crossed the network of the cluster that the ranks ran on.",
    Network.SIMULATED: "No byte moved: every time is the simulator's.",
}


def _lead(run: Run) -> str:
    note = (
        " Compute times are those of an emulated accelerator: real maths, then a wait."
        if run.emulated
        else ""
    )
    return WHERE[run.network] + note


def _origins(run: Run, *keys: str) -> dict[Provenance, str]:
    """Where these figures come from; the modes are named where they differ."""
    return by_source((mode.name, mode.origin(key)) for mode in run.modes for key in keys)


def _pair(run: Run) -> tuple[Mode, Mode] | None:
    """What is compared: the first way and the last."""
    return (run.modes[0], run.modes[-1]) if len(run.modes) > 1 else None


def _headlines(run: Run) -> list[tuple[str, str]]:
    last = run.modes[-1]
    found = []
    if pair := _pair(run):
        a, b = (mode.summary["iteration_s"] for mode in pair)
        found.append((f"{(b - a) / a:+z.0%}", f"iteration time, {pair[1].name} against {pair[0].name}"))
        x, y = (mode.summary["exchange_s"] for mode in pair)
        kind = "faster" if x >= y else "slower"
        found.append(
            (f"{max(x, y) / min(x, y):.2f} x", f"{kind} exchanges") if x and y else ("-", "exchanges")
        )
    found.append(
        (
            f"{last.summary['x_bound']:.2f} x",
            f"the lower bound: {last.name}'s exchanges from the last rank's arrival",
        )
    )
    if pair:
        found.append((_small(loss_gap(run)), "largest difference of the loss over all steps"))
    else:
        found.append((f"{last.summary['tokens_per_s']:,.0f}", "tokens per second"))
    return found


def _small(difference: float) -> str:
    if math.isnan(difference):
        return "no number"
    return f"{difference:.1e}" if difference else "0"


def _comparison(run: Run) -> Section:
    columns = ("", "iteration", "exchange", "share of iteration", "x bound", "gather", "waiting", "planning", "balancedness", "tokens/s", "loss")  # fmt: skip
    rows = []
    for mode in run.modes:
        s = mode.summary
        rows.append(
            (
                mode.name,
                show_seconds(s["iteration_s"]),
                show_seconds(s["exchange_s"]),
                f"{s['exchange_s'] / s['iteration_s']:.0%}",
                f"{s['x_bound']:.2f}",
                show_seconds(s["gather_s"]),
                show_seconds(s["wait_s"]),
                show_seconds(s["plan_s"]),
                f"{s['balancedness']:.2f}",
                f"{s['tokens_per_s']:,.0f}",
                f"{s['loss']:.6f}",
            )
        )
    note = (
        "Per iteration, medians over the steps after the warm-up. Exchange: from the last rank's arrival to the last row's, all "
        "exchanges of rows in a step together; gather: the same of experts' parameters and gradients. x bound: that over the least time any schedule could take for the same rows, "
        "which is less than 1 where ranks that arrived early had sent before the last came. "
        "Waiting: for the slowest rank to arrive, mean over the ranks. Balancedness: mean over max rows computed by a rank."
    )
    shown = {
        "iteration, waiting, tokens/s": ("iteration_s", "wait_s", "tokens_per_s"),
        "exchange, x bound, gather": ("exchange_s", "x_bound", "gather_s"),
        "planning, balancedness, loss": ("plan_s", "balancedness", "loss"),
    }
    origins = by_source(
        (names, mode.origin(key)) for mode in run.modes for names, keys in shown.items() for key in keys
    )
    return Section("Comparison", origins, note, columns=columns, rows=rows, strong=[len(rows) - 1])


def _attribution(run: Run) -> list[Section]:
    ratios = attribution(run)
    if not ratios:
        return []
    note = (
        "How many times longer the mode on the right takes an iteration than the one on the left, which has more of moeyard: median over the steps that both "
        f"made after the warm-up, paired step by step. {' '.join(told_by_model(run))}"
    )
    return [
        Section(
            "What saves what", _origins(run, "iteration_s"), note, columns=COLUMNS, rows=table_rows(ratios)
        )
    ]


def told_by_model(run: Run) -> list[str]:
    """One sentence on what is hidden, one on how near the simulator was, of every mode that has them."""
    said = []
    for mode in run.modes:
        share, off = hidden(run, mode), prediction_error(mode)
        predicted = mode.summary.get("predicted")
        if share is not None:
            hideable = predicted["hideable"] if predicted else None
            model = "" if hideable is None else f"; the model calls {hideable:.0%} hideable"
            said.append(f"{mode.name} hides {share:.0%} of gathers and reduces{model}.")
        if off is not None:
            said.append(f"{mode.name}: simulated {off:+z.0%} beside measured.")
    return said


def _parts(run: Run) -> Section:
    """The parts of every rank add up to the iteration, so their means do too."""
    parts = {mode.name: mode.summary["parts_s"] for mode in run.modes}
    note = (
        "Every moment of every rank's iteration, from the last rank's begin to the last rank's end, is one of these; means over the ranks and over the "
        "steps after the warm-up, so a bar is as long as the mean iteration. Waiting: for the last rank to arrive at an exchange or at the "
        "end of the step. Compute is what is left: the maths, the optimizer, the reduction of dense gradients."
    )
    return Section(
        "Where the time goes", _origins(run, "parts_s"), note, figure=figures.iteration_parts(parts)
    )


def _rails(run: Run) -> Section:
    rows = {
        mode.name: {way: np.array(mode.summary["rows_per_rail"][way], dtype=float) for way in ("out", "in")}
        for mode in run.modes
        if "rows_per_rail" in mode.summary
    }
    shown = [mode for mode in run.modes if mode.name in rows]
    origins = by_source((mode.name, mode.origin("rows_per_rail")) for mode in shown)
    modelled = [m.name for m in shown if m.origin("rows_per_rail").source is Source.MODELLED]
    last = run.modes[-1].measured
    if not any(side.any() for sides in rows.values() for side in sides.values()):
        return Section("Rows per rail", origins, "None: no row left its node, so none crossed a nic.")
    note = "Rows that crossed each nic in one step (mean over the steps), all exchanges together. Rows that stay inside a node cross none."
    if modelled:
        note += (
            f" {' and '.join(modelled)}: not counted, torch's own all-to-all tells nobody; as if each row took the rail of the lower of its "
            f"two local ranks, which is gloo's rule (NCCL has rules of its own)."
        )
    note += "".join(_once(mode) for mode in shown)
    dead = None if last is None else last.cluster.rails
    labelled = {name + " (modelled)" * (name in modelled): sides for name, sides in rows.items()}
    return Section("Rows per rail", origins, note, figure=figures.rails_heat(labelled, dead))


def _once(mode: Mode) -> str:
    """What crossed because a token crosses to a node once, beside what would have."""
    sent, plain = (mode.summary.get(name, 0.0) for name in ("rows_sent", "rows_plain"))
    if sent == plain:
        return ""
    rails = np.array(mode.summary["rows_per_rail"]["out"]).sum(axis=0)
    shares = ", ".join(f"{rows:.0f} of {rows * plain / sent:.0f}" for rows in rails)
    return (
        f" {mode.name}: a token crosses to a node once, so {sent:.0f} of the {plain:.0f} rows between nodes were sent ({sent / plain:.0%}); "
        f"by rail, as if those not sent had been spread likewise: {shares}."
    )


def _exchanges(run: Run) -> list[Section]:
    sections = []
    courses: list[tuple[str, Timeline]] = []
    least = 0.0
    for mode in run.modes:
        if mode.measured is None:
            continue
        courses.append((f"{mode.name}, measured", mode.measured))
        least = bound(mode.measured.cluster, mode.measured.traffic)
        if mode.planned is None:
            continue
        courses.append((f"{mode.name}, planned", mode.planned))
        note = (
            f"One dispatch of the last step ({mode.measured.scheduler}): every message between nodes, on the line of the nic that "
            f"sends it, coloured by where it goes. Wide and pale: planned (simulated). Narrow: measured, clocks aligned over "
            f"the ranks. Planned {show_seconds(mode.planned.makespan)}, measured {show_seconds(mode.measured.makespan)}."
        )
        figure = figures.timelines(mode.planned, mode.measured)
        sections.append(
            Section(
                f"One exchange, {mode.name}: planned and measured",
                by_source([("narrow", mode.measured.provenance), ("wide", mode.planned.provenance)]),
                note,
                figure=figure,
            )
        )
    if courses:
        note = (
            "How quickly the bytes of one dispatch arrive. The bound is that of the last mode's rows: other replicas mean other rows, "
            "so the modes need not deliver the same number of bytes."
        )
        origins = by_source((name, timeline.provenance) for name, timeline in courses)
        sections.append(Section("Bytes arrived", origins, note, figure=figures.delivered(courses, least)))
    return sections


def _wan(run: Run) -> Section:
    rows = [
        (mode.name, f"{mode.summary['wan_bytes'] / 1e6:,.3f} MB", f"{mode.summary['wan_copies']:,.1f}")
        for mode in run.modes
        if "wan_bytes" in mode.summary
    ]
    note = (
        "Between datacenters, in one step (medians): bytes that left all of them, and experts that crossed, each as often as it did. In a lab its routers "
        "count the bytes: rows, experts, gradients of experts and of everything else, control, headers and whatever was sent twice."
    )
    return Section(
        "Across the wan", _origins(run, "wan_bytes"), note, columns=("", "bytes", "copies of experts"), rows=rows
    )  # fmt: skip


def _events(run: Run) -> Section:
    rows = [
        (mode.name, str(e["step"]), e["event"], e.get("detail", ""))
        for mode in run.modes
        for e in mode.events
    ]
    note = "What happened to the network while the job ran, and what the job did about it."
    return Section(
        "Events", _origins(run, "events"), note, columns=("run", "step", "event", "detail"), rows=rows
    )


def _curves(run: Run, events: list[tuple[int, str]]) -> list[Section]:
    def lines(key: str) -> dict[str, tuple[list[int], list[float]]]:
        return {mode.name: mode.column(key) for mode in run.modes}

    gap = loss_gap(run)
    same = ""
    if len(run.modes) > 1:
        codecs = "".join(f" {one}." for one in told_of_codecs(run))
        which = "The lines without a codec" if codecs else "The lines"
        lie = "lie" if gap <= run.same_loss else "do NOT lie"
        same = f"{which} {lie} on each other: largest difference {_small(gap)}.{codecs}"
    loss = figures.over_steps(lines("loss"), "loss", events=events)
    balance = figures.over_steps(lines("balancedness"), "mean / max rows of a rank", events=events, zero=True)
    seconds = figures.over_steps(lines("seconds"), "seconds", events=events, zero=True)
    ratio = figures.over_steps(lines("x_bound"), "x bound", events=events, zero=True)
    return [
        Section("Loss", _origins(run, "loss"), same, figure=loss, wide=False),
        Section("Balancedness", _origins(run, "balancedness"), "1 means that every rank computes equally many rows.", figure=balance, wide=False),
        Section("Iteration time", _origins(run, "iteration_s"), "", figure=seconds, wide=False),
        Section("Exchange time over the bound", _origins(run, "x_bound"), "", figure=ratio, wide=False),
    ]  # fmt: skip
