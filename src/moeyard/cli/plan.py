"""`moeyard plan CLUSTER DEMAND_OR_TRACE`: planners side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moeyard.assign import POLICIES
from moeyard.cli import complete
from moeyard.cli.show import check_place, console, print_json, table
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, MoeyardError, UnknownName, suggest
from moeyard.fold import fold
from moeyard.formats import load_cluster, load_demand
from moeyard.formats.arrays import read_arrays
from moeyard.formats.clusters import cluster_data
from moeyard.formats.models import load_model, model_config, model_names
from moeyard.formats.placements import save_placement
from moeyard.formats.strict import named
from moeyard.formats.traces import find_trace, trace_names
from moeyard.kernels.build import prepare
from moeyard.model import STAND_IN, ModelSpec
from moeyard.model import top_k as top_k_of
from moeyard.planners import PLANNERS
from moeyard.planners.compare import Plan, compare_planners
from moeyard.provenance import CLOCKED, CLOSED_FORM, data_of
from moeyard.units import parse_bytes, show_bytes, show_seconds

LATEST = -1  # record
_MODELLED = (
    "bound_s", "time_s", "x_bound", "balancedness", "gathered_bytes", "migrated_bytes", "rows_sent", "rows_plain", "dispatch_s", "experts_s",
    "exposed_gather_s", "exposed_reduce_s",
)  # fmt: skip


def run(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER",
            autocompletion=complete.clusters,
            help="A built-in cluster (see `moeyard clusters`) or a TOML file.",
        ),
    ],
    demand: Annotated[
        str,
        typer.Argument(
            metavar="DEMAND_OR_TRACE",
            autocompletion=complete.traces,
            help="rows[rank, expert] as .npy, .npz or .csv; or a recorded trace, folded onto the cluster: .npz with `counts`, "
            f".jsonl, .pt, or one of {', '.join(trace_names())}.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete.models,
            help=f"{', '.join(model_names())}, or a Hugging Face config.json; without it a stand-in, and a line that says so.",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Replica slots per rank, at most; default: no cap, each planner stops by its own rule (balanced: at 1).",
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option(help='Bytes per rank for replicas, such as "2 GB".')] = None,
    planner: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=complete.planners, help=f"Only this one of {', '.join(PLANNERS)}; may be repeated."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete.policies,
            help=f"Assign all plans so: {', '.join(POLICIES)}; default: each planner's own.",
        ),
    ] = None,
    record: Annotated[int, typer.Option(help="Record of a trace; negative: from the end.")] = LATEST,
    layer: Annotated[int, typer.Option(help="Layer of a trace.")] = 0,
    dedup: Annotated[
        bool,
        typer.Option(
            "--dedup",
            help="A token crosses to a node once, where that pays: --top-k, the trace or the model says of how many choices.",
        ),
    ] = False,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=1, help="Experts that a token chooses; default what the trace says, else the model."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the best placement to this JSON file.")] = None,
) -> None:
    """Compare planners on one layer's demand.

    For each: balancedness (mean / slowest rank), replicas, bytes that replicas gather each step, bytes that homes moved
    (once), predicted time of the layer's forward and backward, how many times the bound that no placement can beat, and
    the time to plan (warm).
    """
    check_place("--save", save)
    machines = load_cluster(cluster)
    asked, folded = read_demand(demand, machines.num_ranks, record, layer)
    spec = STAND_IN if model is None else load_model(model)
    if memory is not None:
        fits = int(min(parse_bytes(memory) // spec.expert_bytes, asked.num_experts))
        slots = fits if slots is None else min(slots, fits)
    prepare("plan")
    chosen = _choices(demand, model, top_k) if dedup else 1
    plans = compare_planners(
        machines, asked, planners=planner, policy=policy, slots=slots, model=spec, dedup="auto" if dedup else False, top_k=chosen
    )  # fmt: skip
    best = min(plans, key=lambda plan: plan.cost.total)
    if save is not None:
        save_placement(best.placement, save)
    if json:
        print_json(
            _data(machines, asked, spec, slots, plans, best)
            | {"model": model, "model_assumed": model is None, "folded": folded or None}
            | {"dedup": "auto" if dedup else False, "top_k": chosen if dedup else None}
        )
    else:
        _show(machines, asked, spec, plans, best, save)
        if dedup:
            console().print(
                f"rows between nodes, {best.placement.planner}: {best.rows_sent} sent of {best.rows_plain}, if the {chosen} choices of a token know "
                f"nothing of one another"
            )
        if folded:
            console().print(f"folded: {folded}")
        if model is None:
            console().print(
                f"no --model: planned for a stand-in of {show_bytes(spec.expert_bytes)} experts and {spec.layers} layers; "
                f"another model may want another planner"
            )


def _choices(source: str, model: str | None, given: int | None) -> int:
    """Of a token."""
    said = given or (find_trace(source).meta.get("top_k") if _recorded(source) else None)
    if said is None and model is not None:
        with named(model):
            said = top_k_of(model_config(model))
    if type(said) is not int or said < 1:
        raise MoeyardError(
            f"--dedup: {source} does not say how many experts a token chooses; add --top-k or --model"
        )
    return said


def _recorded(source: str) -> bool:
    suffix = Path(source).suffix
    named = source in trace_names() or suffix in (".jsonl", ".pt")
    return named or (suffix == ".npz" and "counts" in read_arrays(source))


def read_demand(source: str, ranks: int, record: int, layer: int) -> tuple[Demand, str]:
    """From a trace, by name or if the file holds one, folded onto so many ranks; else rows[rank, expert]. And how it was folded."""
    suffix = Path(source).suffix
    if _recorded(source):
        trace = fold(find_trace(source), ranks)
        return trace.demand(record, layer), str(trace.meta.get("folded", ""))
    if not suffix and not Path(source).exists():
        near = suggest(source, trace_names())
        raise UnknownName(
            f"unknown trace {source!r}; {near}{'' if near.endswith('?') else '.'} Or give a file of rows[rank, expert]: "
            f".npy, .npz or .csv"
        )
    if (record, layer) != (LATEST, 0):
        raise InvalidDemand(
            f"{source}: one demand, no records and layers; leave --record and --layer out, or give a trace"
        )
    return load_demand(source), ""


def _data(
    cluster: Cluster, demand: Demand, model: ModelSpec, slots: int | None, plans: list[Plan], best: Plan
) -> dict[str, Any]:
    return {
        "cluster": cluster_data(cluster),
        "ranks": demand.num_ranks,
        "experts": demand.num_experts,
        "rows": int(demand.rows.sum()),
        "row_bytes": model.row_bytes,
        "expert_bytes": model.expert_bytes,
        "slots": slots,
        "bound_s": plans[0].floor,
        "best": best.planner,
        "planners": [
            {
                "planner": plan.planner,
                "label": plan.placement.planner,
                "policy": plan.policy,
                "balancedness": plan.balancedness,
                "copies": plan.placement.copies,
                "gathered_bytes": plan.gathered_bytes,
                "migrated_bytes": plan.migrated_bytes,
                "rows_sent": plan.rows_sent,
                "rows_plain": plan.rows_plain,
                "time_s": plan.cost.total,
                "dispatch_s": plan.cost.dispatch,
                "experts_s": plan.cost.expert_forward + plan.cost.expert_backward,
                "exposed_gather_s": plan.cost.exposed_gather,
                "exposed_reduce_s": plan.cost.exposed_reduce,
                "x_bound": plan.x_bound,
                "plan_s": plan.plan_seconds,
            }
            for plan in plans
        ],
        "provenance": data_of(dict.fromkeys(_MODELLED, CLOSED_FORM) | {"plan_s": CLOCKED}),
    }


def _show(
    cluster: Cluster, demand: Demand, model: ModelSpec, plans: list[Plan], best: Plan, save: Path | None
) -> None:
    out = console()
    out.print(
        f"{cluster.name or 'cluster'}: {demand.num_ranks} ranks; {demand.num_experts} experts of "
        f"{show_bytes(model.expert_bytes)}, {demand.rows.sum()} rows of {show_bytes(model.row_bytes)}"
    )
    out.print(f"bound of one layer, forward and backward: {show_seconds(plans[0].floor)}")
    rows = table(
        "planner", ">balance", "?>copies", "?>gathered", "?>migrated", ">time", ">x bound", "?>plan", ""
    )
    for plan in plans:
        rows.add_row(
            plan.placement.planner,
            f"{plan.balancedness:.3f}",
            str(plan.placement.copies),
            show_bytes(plan.gathered_bytes),
            show_bytes(plan.migrated_bytes),
            show_seconds(plan.cost.total),
            f"{plan.x_bound:.3f}",
            show_seconds(plan.plan_seconds),
            "<-" if plan is best else "",
            style="bold" if plan is best else None,
        )
    out.print(rows)
    out.print(f"time, x bound, balance: {CLOSED_FORM}, in closed form; plan: {CLOCKED}")
    if save is not None:
        out.print(f"saved {best.placement.planner} to {save}")
