"""What `replay` and `advise` both ask for: a trace on a cluster's ranks, and a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moeyard.cli import complete
from moeyard.cluster import Cluster
from moeyard.dedup import check_top_k
from moeyard.demands import DEMANDS, Shape, demand_over_time
from moeyard.errors import InvalidDemand, MoeyardError, UnknownName
from moeyard.fold import fold
from moeyard.formats import load_cluster
from moeyard.formats.models import load_model, model_config, model_names
from moeyard.formats.recorded import READERS
from moeyard.formats.strict import named
from moeyard.formats.traces import find_trace, trace_names
from moeyard.model import STAND_IN, ModelSpec, num_experts, top_k
from moeyard.trace import Trace
from moeyard.units import show_bytes

ClusterName = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER",
        autocompletion=complete.clusters,
        help="A built-in cluster (see `moeyard clusters`) or a TOML file.",
    ),
]
TraceName = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        autocompletion=complete.demand,
        help=f"Recorded routing: {', '.join(trace_names())}, or a file ({', '.join(READERS)}; docs/replay.md has the forms); "
        f"or made: {', '.join(DEMANDS)}.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.models,
        help=f"{', '.join(model_names())}, or a Hugging Face config.json. Default: a stand-in, and a line that says so.",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens per rank and step: counts are scaled to them. Default: as recorded; 4096 where made.",
    ),
]
Records = Annotated[
    int | None, typer.Option(min=1, help="Only the first so many; of a made one, default 32.")
]
Layers = Annotated[int | None, typer.Option(min=1, help="Only the first so many; of a made one, default 4.")]
Experts = Annotated[int | None, typer.Option(min=1, help="Of a made trace; default the model's, else 64.")]
TopK = Annotated[
    int | None,
    typer.Option(min=1, help="Experts that a token chooses; default what the trace says, else the model."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of a made trace.")]


@dataclass(frozen=True)
class Wanted:
    """What the options said."""

    model: str | None = None
    tokens: int | None = None
    records: int | None = None
    layers: int | None = None
    experts: int | None = None
    top_k: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A trace on the cluster's ranks, and what it is of."""

    cluster: Cluster
    trace: Trace
    model: ModelSpec
    model_name: str | None
    top_k: int | None
    conditions: dict[str, str]


def read_case(cluster: str, source: str, wanted: Wanted) -> Case:
    """Load, make or fold; say what was done."""
    machines = load_cluster(cluster)
    if not machines.name:
        machines = machines.but(name=Path(cluster).stem)
    config = None if wanted.model is None else model_config(wanted.model)
    _of_model(num_experts, wanted, config)  # a dense model is refused for that
    trace = _trace(source, machines.num_ranks, wanted, config)
    chosen, differ = _choices(source, trace, wanted, config)
    if wanted.tokens is not None and chosen is None:
        raise MoeyardError(
            f"--tokens {wanted.tokens}: {source} does not say how many experts a token chooses; add --top-k or --model"
        )
    made = source.partition(":")[0] in DEMANDS  # with as many tokens as are wanted
    rows = None if wanted.tokens is None or made else float(wanted.tokens * (chosen or 1))
    part = _part(trace, wanted)
    if not part.counts[part.num_records > 1 :].any():  # the first is where a past begins
        raise InvalidDemand(
            f"{source}: no rows in {part.num_records} records and {part.num_layers} layers, or in the first record only; give a trace with some"
        )
    folded = fold(part, machines.num_ranks, rows_per_rank=rows)
    alone = folded.num_records == 1  # nothing to plan from, and nothing to judge a plan by
    if alone:
        folded = Trace(folded.counts.repeat(2, axis=0), folded.steps[0] + [0, 1], folded.meta)
    mean = float(folded.counts.sum()) / (folded.num_records * folded.num_layers * folded.num_ranks)
    tokens = None if chosen is None else max(1, round(mean / chosen))
    model = STAND_IN if wanted.model is None else load_model(wanted.model, tokens_per_rank=tokens)
    conditions = {
        "cluster": f"{machines.name}: {machines.nodes} nodes x {machines.ranks_per_node} ranks"
        + (f" in {machines.datacenters} datacenters" if machines.datacenters > 1 else ""),
        "trace": f"{source}: {folded.num_records} records, {folded.num_layers} layers, {folded.num_experts} experts, "
        f"{mean:.0f} rows per rank and layer",
        "source": str(trace.meta.get("source", "recorded")),
        "folded": str(folded.meta.get("folded", "no: the trace has the cluster's ranks")),
        "model": _model_line(wanted.model, model, config, folded),
    }
    if differ:
        conditions["choices"] = differ
    if alone:
        conditions["records"] = (
            "one record, taken twice: what comes next is taken to be like it, so the forecast is not judged"
        )
    if "taken" in trace.meta:
        conditions["taken"] = str(trace.meta["taken"])
    if "shares" in trace.meta:
        conditions["loads"] = str(trace.meta["shares"])
    return Case(machines, folded, model, wanted.model, chosen, conditions)


def _trace(source: str, ranks: int, wanted: Wanted, config: Any) -> Trace:
    if source.partition(":")[0] in DEMANDS:
        given = {
            "records": wanted.records,
            "layers": wanted.layers,
            "tokens": wanted.tokens,
            "experts": wanted.experts or _of_model(num_experts, wanted, config),
            "top_k": wanted.top_k or _of_model(top_k, wanted, config),
        }
        shape = {key: value for key, value in given.items() if value is not None}
        if "top_k" not in shape:
            shape["top_k"] = min(8, shape.get("experts", 64))
        return demand_over_time(source, ranks, Shape(**shape, seed=wanted.seed))
    if wanted.experts is not None:
        raise MoeyardError(f"--experts is of a made trace; {source} is recorded")
    try:
        return find_trace(source)
    except UnknownName:
        raise UnknownName.of("trace", source, [*trace_names(), *DEMANDS]) from None


def _choices(source: str, trace: Trace, wanted: Wanted, config: Any) -> tuple[int | None, str]:
    """Experts that a token chooses: what --top-k says, else the trace, else the model; and a line where others say otherwise."""
    traced, modelled = trace.meta.get("top_k"), _of_model(top_k, wanted, config)
    traced = traced if type(traced) is int and traced > 0 else None
    said = {"--top-k": wanted.top_k, source: traced, f"--model {wanted.model}": modelled}
    by, chosen = next(((by, k) for by, k in said.items() if k is not None), ("", None))
    if chosen is not None:
        with named(by):
            check_top_k(chosen, trace.num_experts)
    others = ", ".join(f"{by}: {k}" for by, k in said.items() if k not in (None, chosen))
    return chosen, f"{chosen} a token, by {by}; not {others}" if others else ""


def _of_model(what: Callable[[Any], int], wanted: Wanted, config: Any) -> int | None:
    if config is None:
        return None
    with named(str(wanted.model)):
        return what(config)


def _part(trace: Trace, wanted: Wanted) -> Trace:
    counts = trace.counts[: wanted.records, : wanted.layers]
    return (
        trace
        if counts.shape == trace.counts.shape
        else Trace(counts, trace.steps[: wanted.records], trace.meta)
    )


def _model_line(name: str | None, model: ModelSpec, config: Any, trace: Trace) -> str:
    sizes = f"rows of {show_bytes(model.row_bytes)}, experts of {show_bytes(model.expert_bytes)}, {model.layers} MoE layers"
    if name is None:
        return f"a stand-in ({sizes}; nothing but experts computes); --model gives yours"
    experts = num_experts(config)
    note = (
        ""
        if experts == trace.num_experts
        else f"; it has {experts} experts, the trace {trace.num_experts}: sizes are of the model, routing of the trace"
    )
    return f"{name}: {sizes}, {model.flops / 1e12:.0f} Tflop/s per rank{note}"
