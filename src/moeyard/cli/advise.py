"""`moeyard advise CLUSTER TRACE`: would it help me, and what would I switch on?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from moeyard.advise import IDEAS, WORTH, Advice, Choice, one_step, sample
from moeyard.advise import advise as make_advice
from moeyard.cli import complete
from moeyard.cli.routing import (
    Case,
    ClusterName,
    Experts,
    Layers,
    ModelName,
    Records,
    Seed,
    Tokens,
    TopK,
    TraceName,
    Wanted,
    read_case,
)  # fmt: skip
from moeyard.cli.show import check_place, console, notice, print_json, table
from moeyard.kernels.build import prepare
from moeyard.provenance import CLOCKED, CLOSED_FORM, data_of
from moeyard.replay.job import AHEAD
from moeyard.units import show_bytes, show_seconds


def run(
    cluster: ClusterName,
    trace: TraceName,
    model: ModelName = None,
    forecast: Annotated[str, typer.Option(autocompletion=complete.forecasts, help="What placements are made from. ahead: the last records, as the runtime plans; last, ema or trend of the records before.")] = AHEAD,
    slots: Annotated[int | None, typer.Option(min=1, help="Replica slots per rank; default: as many as are worth their memory, at most 4.")] = None,
    overlap: Annotated[bool, typer.Option(help="Gathers and reduces hide behind compute, as the runtime has them.")
    ] = True,
    tokens: Tokens = None,
    records: Records = None,
    layers: Layers = None,
    experts: Experts = None,
    top_k: TopK = None,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write a page to this HTML file: savings, a step's timeline, where it pays.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a page of text.")] = False,
) -> None:  # fmt: skip
    """Say what a step costs today, what each idea would save on it, and what to switch on.

    Today is a plain all-to-all with experts at home. Takes the last records of the trace and a few of its layers; all times are
    modelled. `moeyard replay` looks at every record.
    """
    check_place("--out", out)
    case = read_case(cluster, trace, Wanted(model, tokens, records, layers, experts, top_k, seed))
    prepare("plan")
    prepare("schedule")
    status = Console(stderr=True, highlight=False)
    with status.status("replaying; usually half a minute") as bar:
        advice = make_advice(
            case.cluster, case.trace, case.model, forecast=forecast, slots=slots, overlap=overlap, top_k=case.top_k,
            jobs=jobs or os.cpu_count() or 1, watch=lambda said: bar.update(f"replaying: {said}"),
        )  # fmt: skip
        if out is not None:
            bar.update("replaying: where it pays")
            page = _page(case, advice, cluster, forecast, overlap)
    name = cluster if not Path(cluster).suffix else str(Path(cluster))
    if json:
        print_json(_data(case, advice, name, forecast, overlap))
    else:
        _show(case, advice, name, forecast, overlap)
    if out is not None:  # after what was found is told
        out.write_text(page, encoding="utf-8")
        notice(f"page: {out}")


def _page(case: Case, advice: Advice, cluster: str, forecast: str, overlap: bool) -> str:
    from moeyard.breakeven import experts_by_wan, tokens_by_rate
    from moeyard.replay import Job
    from moeyard.report.advice import advice_page

    part, _ = sample(case.trace)
    base = Job(case.cluster, part, case.model, forecast=forecast, overlap=overlap, top_k=case.top_k or 1)
    steps = {
        "today": one_step(base, advice.today),
        "together": one_step(base, advice.together),
    }
    grids = [tokens_by_rate(base, advice.together), experts_by_wan(base, advice.together)]
    page = advice_page(
        advice,
        case.conditions,
        steps,
        [grid for grid in grids if grid is not None],
        advice.together.yard(cluster),
    )
    return page.html()


def _data(case: Case, advice: Advice, cluster: str, forecast: str, overlap: bool) -> dict[str, Any]:
    ways = advice.alone | {"together": advice.together}
    return {
        "today_s": advice.today.step_s,
        "savings": {name: advice.today.step_s - choice.step_s for name, choice in ways.items()},
        "yard": advice.together.yard(cluster) if advice.worth else None,
        "memory_bytes": advice.memory_bytes if advice.worth else 0,
        "worth": advice.worth,
        "bound_s": advice.bound_s,
        "step_s": {name: choice.step_s for name, choice in ways.items()} | {"counts_known": advice.known.step_s},
        "choices": {
            name: {"planner": c.planner, "scheduler": c.scheduler, "slots": c.slots, "dedup": c.how_dedup}
            for name, c in ways.items()
        },
        "forecast": {"method": forecast, "error": advice.error},
        "not_below_tokens_share": advice.least_tokens,
        "plan_s": advice.together.plan_s,
        "overlap": overlap,
        "looked_at": {"records": advice.records, "layers": advice.layers},
        "conditions": case.conditions,
        "provenance": data_of(
            dict.fromkeys(("today_s", "savings", "step_s", "bound_s", "memory_bytes"), CLOSED_FORM)
            | {"plan_s": CLOCKED}
        ),
    }  # fmt: skip


def _show(case: Case, advice: Advice, cluster: str, forecast: str, overlap: bool) -> None:
    out = console()
    for name in ("cluster", "trace", "taken", "model", "choices", "folded", "loads", "records"):
        text = case.conditions.get(name)
        if text and not text.startswith("no:"):
            out.print(f"{name}: {text}")
    rows = table("", "?", ">a step", ">saves", "how")
    rows.add_row("today", "plain all-to-all, experts at home", show_seconds(advice.today.step_s), "", "")
    for name, choice in advice.alone.items():
        rows.add_row(
            name, IDEAS[name], show_seconds(choice.step_s), f"{advice.saving(choice):z.0%}", _how(choice)
        )
    both = advice.together
    rows.add_row(
        "together",
        "the best of all",
        show_seconds(both.step_s),
        f"{advice.saving(both):z.0%}",
        _how(both),
        style="bold",
    )
    out.print(rows)
    out.print(
        f"today is {advice.today.step_s / advice.bound_s:.1f} x the bound that no placement beats ({show_seconds(advice.bound_s)}); "
        f"a rank has at most {advice.most_rows:.1f} x the mean rows"
    )
    if advice.balanced:
        fewer = [
            name
            for name in LESS_TRAFFIC
            if name in advice.alone and advice.saving(advice.alone[name]) >= NOTHING
        ]
        but = f"; {' and '.join(fewer)} would save by sending less, however even it is" if fewer else ""
        out.print(f"the routing is balanced: schedules and replicas have little to gain here{but}")
    if case.cluster.nodes > 1 and case.top_k is None:
        out.print("dedup: not told how many experts a token chooses; --top-k or --model says it")
    if not advice.worth:
        out.print(
            f"little to gain: at most {max(0.0, advice.saving(both)):.0%} of a step; below {WORTH:.0%} a model promises nothing. Stay with what you have.",
            style="bold",
        )
    else:
        _what_to_do(out, case, advice, cluster, forecast)
    rule = (
        f"; dedup: as if the {case.top_k} choices of a token knew nothing of one another"
        if "dedup" in advice.alone
        else ""
    )
    out.print(
        f"all times {CLOSED_FORM}, of {advice.records} records and {advice.layers} layers scaled to {case.model.layers}; gathers and "
        f"reduces {'hidden' if overlap else 'not hidden'} behind compute; planning {show_seconds(both.plan_s)} a layer here ({CLOCKED}), not in it{rule}"
    )


def _what_to_do(out: Console, case: Case, advice: Advice, cluster: str, forecast: str) -> None:
    both = advice.together
    if both.planner != "static":
        lost = 1 - advice.known.step_s / both.step_s
        sure = "sure" if lost < 0.05 else "fair" if lost < 0.2 else "poor"
        out.print(
            f"forecast ({forecast}): {sure}: {advice.error:.0%} of rows guessed for the wrong rank or expert; with counts known "
            f"a step would take {show_seconds(advice.known.step_s)} ({_more_or_less(lost)})"
        )
        less = 2 * (both.slots or 0) * (case.model.expert_bytes + case.model.gradient_bytes)
        out.print(
            f"memory: {show_bytes(advice.memory_bytes)} per rank: {both.slots} replicas of {show_bytes(case.model.expert_bytes)} in {case.model.layers} "
            f"layers, gradients in two; with resident=False {show_bytes(less)}, gathered twice"
        )
    idle = [name for name, choice in advice.alone.items() if advice.saving(choice) < NOTHING]
    where = [f"{', '.join(idle)} alone"] if idle else []
    if advice.least_tokens is not None:
        where.append(f"1/{round(1 / advice.least_tokens)} of these tokens or fewer, by the ways tried there")
    out.print(f"would not pay: {'; '.join(where) or 'nothing found'}")
    out.print(Text.assemble("switch on: ", (both.yard(cluster), "bold")), soft_wrap=True)


NOTHING = 0.02  # share of a step
LESS_TRAFFIC = ("domains", "dedup")  # ideas that need no skew


def _more_or_less(saved: float) -> str:
    """Of a step; the last digit shown decides."""
    percent = round(100 * abs(saved))
    return "as long" if percent == 0 else f"{percent}% {'less' if saved > 0 else 'more'}"


def _how(choice: Choice) -> str:
    once = ", once" if choice.dedup else ""
    if choice.planner == "static":
        return f"scheduler {choice.scheduler}{once}"
    return f"{choice.planner}, {choice.slots} slots, {choice.scheduler}{once}"
