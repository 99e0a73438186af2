"""`moeyard replay CLUSTER TRACE`: every record of a trace through planners x schedulers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from moeyard.cli import complete
from moeyard.cli.routing import (
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
from moeyard.cli.show import Waiting, console, print_json, table
from moeyard.forecast import FORECASTS
from moeyard.formats.replays import begin, replay_data, save_progress, save_replay
from moeyard.kernels.build import prepare
from moeyard.planners import PLANNERS
from moeyard.provenance import CLOCKED
from moeyard.replay import Job, Replay
from moeyard.replay import replay as make_replay
from moeyard.replay.job import AHEAD, ORACLE
from moeyard.schedulers import SCHEDULERS
from moeyard.units import show_seconds
from moeyard.workers import BACKENDS, check_backend


def run(
    cluster: ClusterName,
    trace: TraceName,
    model: ModelName = None,
    planner: Annotated[list[str] | None, typer.Option(autocompletion=complete.planners, help=f"Of {', '.join(PLANNERS)}; may be repeated; default static and auto.")] = None,
    scheduler: Annotated[list[str] | None, typer.Option(autocompletion=complete.schedulers, help=f"Of {', '.join(SCHEDULERS)}; may be repeated; default direct and auto.")] = None,
    forecast: Annotated[str, typer.Option(autocompletion=complete.all_forecasts, help=f"What a placement is made from. {AHEAD}: the last records, as the runtime plans; {', '.join(FORECASTS)}: of the records before; {ORACLE}: the record itself.")] = AHEAD,
    slots: Annotated[int | None, typer.Option(min=0, help="Replica slots per rank, at most; default: no cap, each planner stops by its own rule (balanced: at 1).")] = None,
    network: Annotated[str, typer.Option(autocompletion=complete.these("estimate", "simulate", "ports"), help="Exchange times: estimate, simulate (slower), or ports (the busiest port alone).")] = "estimate",
    overlap: Annotated[bool, typer.Option(help="Gathers and reduces hide behind compute, as the runtime has them.")
    ] = True,
    tokens: Tokens = None,
    records: Records = None,
    layers: Layers = None,
    experts: Experts = None,
    top_k: TopK = None,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
    backend: Annotated[str, typer.Option(autocompletion=complete.these(*BACKENDS), help=f"Where they run: {', '.join(BACKENDS)}; dask:ADDRESS or ray:ADDRESS for a cluster.")] = "loky",
    out: Annotated[Path | None, typer.Option(help="Folder for replay.json and replay.npz; `moeyard report FOLDER` makes a page.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Replay recorded routing on a cluster, every record through planners x schedulers.

    For each: seconds of the step (the trace's layers, forward and backward), times the bound that no placement can beat,
    balancedness, time to plan, homes moved. A placement is made from the records before (--forecast), its rows are those that came.
    """
    from moeyard.errors import MoeyardError

    check_backend(backend)
    wanted = Wanted(model, tokens, records, layers, experts, top_k, seed)
    case = read_case(cluster, trace, wanted)
    job = Job(
        case.cluster, case.trace, case.model, tuple(planner or ("static", "auto")), tuple(scheduler or ("direct", "auto")),
        forecast, slots, network, overlap,  # type: ignore[arg-type]
    )  # fmt: skip
    if resume and out is None:
        raise MoeyardError("--resume goes on with what is in --out; name the folder")
    state = None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        state = begin(job, out, resume=resume)
    prepare("plan")
    prepare("schedule")
    found = _replay(job, state, jobs or os.cpu_count() or 1, backend, case.conditions, out)
    if out is not None:
        save_replay(found, out)
    if json:
        print_json(replay_data(found))
    else:
        _show(found, out)


def _replay(
    job: Job, state: Any, jobs: int, backend: str, conditions: dict[str, str], out: Path | None
) -> Replay:
    """What is done is kept after every block."""
    kept = 0 if state is None else state.done
    with Waiting("records", job.trace.num_records, kept) as waiting:

        def watch(now: Any) -> None:
            nonlocal kept
            waiting.update(now.done)
            if out is not None:
                save_progress(job, now, out)
            kept = now.done

        try:
            return make_replay(
                job, jobs=jobs, backend=backend, conditions=conditions, progress=state, watch=watch
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_interrupted(kept, job.trace.num_records, out)) from None


def _interrupted(kept: int, records: int, out: Path | None) -> str:
    if out is None:
        return f"interrupted after {kept} of {records} records, and nothing is kept; with --out FOLDER a replay can go on"
    return f"interrupted: {kept} of {records} records are in {out}; the same command with --resume goes on"


def _show(found: Replay, out: Path | None) -> None:
    shown = console()
    for name, text in found.conditions.items():
        shown.print(f"{name}: {text}")
    asked = found.asked
    hides = "hidden behind compute" if asked["overlap"] else "not hidden"
    shown.print(
        f"forecast: {asked['forecast']}{_error(found)}; exchange times: {asked['network']}; gathers and reduces: {hides}"
    )
    rows = table(
        "planner", "scheduler", ">step", ">x bound", "?>exchange", "?>balance", "?>plan", "?>moved", ""
    )
    best = min(found.ways, key=lambda way: found.summary(way)["step_s"])
    for way in found.ways:
        s = found.summary(way)
        rows.add_row(
            way.planner, way.scheduler, show_seconds(s["step_s"]), f"{s['x_bound']:.3f}", show_seconds(s["exchange_s"]),
            f"{s['balancedness']:.3f}", show_seconds(s["plan_s"]), f"{s['moved_homes']:.0f}", "<-" if way is best else "",
            style="bold" if way is best else None,
        )  # fmt: skip
    shown.print(rows)
    counted = len(found.steps) - found.first
    where = found.provenance()["step_s"]
    shown.print(
        f"means of {counted} records; moved: homes, in all; step, x bound, exchange: {where}; plan, a layer: {CLOCKED}"
    )
    if found.left_out:
        shown.print(found.left_out)
    if out is not None:
        shown.print(f"written to {out}; `moeyard report {out}` makes a page")


def _error(found: Replay) -> str:
    import numpy as np

    error = found.error[found.first :]
    return (
        "" if np.isnan(error).any() else f" ({error.mean():.0%} of rows guessed for the wrong rank or expert)"
    )
