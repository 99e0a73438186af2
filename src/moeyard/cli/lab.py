"""`moeyard lab`: a multi-rail network on this machine, and real ranks on it."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from moeyard.cli import complete
from moeyard.cli.help import WholeSummaries, epilog

app = typer.Typer(
    cls=WholeSummaries,
    help="Run ranks on an emulated multi-rail network: nodes are network namespaces, rails are shaped.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Spec = Annotated[
    str,
    typer.Argument(
        metavar="LAB",
        autocompletion=complete.labs,
        help="lab-2x2, lab-4x4, lab-2dc, lab-4dc, or a TOML file of a cluster.",
    ),
]
Network = Annotated[
    str,
    typer.Option(
        autocompletion=complete.these("auto", "rails", "loopback"),
        help="rails: shaped, or an error. loopback: unshaped. auto: rails where this machine allows it.",
    ),
]
Lab = Annotated[str | None, typer.Option("--lab", help="Which lab, if several run: its name or process id.")]


@app.command(
    "run",
    epilog=epilog(
        "moeyard lab run lab-2x2 -- train.py --steps 8\nmoeyard lab run lab-4x4 --network rails --timeout 60 -- train.py"
    ),
)
def run(
    spec: Spec,
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="What every rank runs.")],
    network: Network = "auto",
    show: Annotated[
        str,
        typer.Option(help="all: every line with its rank. first: rank 0 as it is, others with their rank."),
    ] = "all",
    name: Annotated[str | None, typer.Option(help="Of the lab, for break, slow and mend.")] = None,
    grace: Annotated[float, typer.Option(help="Seconds the others have after a rank failed.")] = 15.0,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds; then all ranks are ended, status 124.")
    ] = None,
    warm: Annotated[
        bool,
        typer.Option(
            help="Load the planning kernels once for all ranks; a script that plans nothing needs none."
        ),
    ] = True,
) -> None:
    """Run a script on every rank, in torchrun's environment. Ends with the status of the first rank that failed.

    The ranks see the cluster in MOEYARD_LAB: a Yard without `cluster` takes it from there, rails included.
    """
    from moeyard.errors import MoeyardError
    from moeyard.lab import run_script

    if show not in ("all", "first"):
        raise MoeyardError(f"--show {show!r} is none of all, first")
    code = run_script(
        a_lab(spec), script[0], script[1:], network=known(network), show=show, warm=warm, name=name, grace=grace, timeout=timeout  # type: ignore[arg-type]
    )  # fmt: skip
    raise typer.Exit(code)


Wan = Annotated[
    int | None, typer.Option("--wan", metavar="DATACENTER", help="Of a datacenter, instead of a node's rail.")
]
Seconds = Annotated[float | None, typer.Option(help="Mended after so many; default: by `lab mend`.")]


@app.command("break", epilog=epilog("moeyard lab break 0 1 --seconds 5\nmoeyard lab break --wan 1"))
def break_(
    where: Annotated[
        list[int] | None, typer.Argument(metavar="NODE RAIL", help="A node's rail, counted from 0.")
    ] = None,
    wan: Wan = None,
    seconds: Seconds = None,
    lab: Lab = None,
) -> None:
    """Cut a node's cable to a rail, or a datacenter off (--wan), while a job runs."""
    place, _ = _place(where or [], wan, 0)
    _order("break", place, seconds, lab, "is cut")


@app.command("slow", epilog=epilog("moeyard lab slow 0 1 0.2\nmoeyard lab slow --wan 1 0.1 --seconds 30"))
def slow(
    where: Annotated[
        list[float] | None,
        typer.Argument(
            metavar="NODE RAIL FACTOR", help="0.2: a fifth of the rate. With --wan DATACENTER: FACTOR alone."
        ),
    ] = None,
    wan: Wan = None,
    seconds: Seconds = None,
    lab: Lab = None,
) -> None:
    """Slow a node's nic, or a datacenter's wan port (--wan), both ways, while a job runs."""
    place, (factor,) = _place(where or [], wan, 1)
    _order("slow", place | {"factor": factor}, seconds, lab, f"runs at {factor:g} of its rate")


@app.command("mend", epilog=epilog("moeyard lab mend 0 1\nmoeyard lab mend --wan 1"))
def mend(
    where: Annotated[
        list[int] | None, typer.Argument(metavar="NODE RAIL", help="A node's rail, counted from 0.")
    ] = None,
    wan: Wan = None,
    lab: Lab = None,
) -> None:
    """Undo break and slow."""
    place, _ = _place(where or [], wan, 0)
    _order("mend", place, None, lab, "is as the lab's file has it")


def _place(given: Sequence[float], wan: int | None, more: int) -> tuple[dict[str, Any], list[float]]:
    """(what to change, the values after it)."""
    from moeyard.errors import MoeyardError

    named = 0 if wan is not None else 2
    if len(given) != named + more:
        wanted = ("NODE RAIL" if wan is None else f"--wan {wan}") + " FACTOR" * more
        got = " ".join(f"{value:g}" for value in given) or "nothing"
        raise MoeyardError(f"{wanted} wanted, got {got}; a rail is NODE RAIL, a wan port is --wan DATACENTER")
    if wan is not None:
        return {"wan": wan}, list(given)
    if not all(float(value).is_integer() for value in given[:2]):
        raise MoeyardError(f"a rail is NODE RAIL, two whole numbers, got {given[0]:g} {given[1]:g}")
    return {"node": int(given[0]), "rail": int(given[1])}, list(given[2:])


def _order(order: str, place: dict[str, Any], seconds: float | None, lab: str | None, done: str) -> None:
    from moeyard.lab import ask

    ask(order, lab=lab, **place, seconds=seconds)
    if "wan" in place:
        what, undo = f"the wan of datacenter {place['wan']}", f"--wan {place['wan']}"
    else:
        what, undo = f"rail {place['rail']} of node {place['node']}", f"{place['node']} {place['rail']}"
    after = f"for {seconds:g} s" if seconds is not None else f"`moeyard lab mend {undo}` undoes it"
    print(f"{what} {done}" + ("" if order == "mend" else f"; {after}"))


@app.command("list", epilog=epilog("moeyard lab list"))
def list_() -> None:
    """The labs that run on this machine."""
    from moeyard.lab import LabError, ask, labs

    running = labs()
    if not running:
        print("no lab runs here; `moeyard lab run lab-2x2 -- SCRIPT` starts one")
    for name in running:
        try:
            found = ask("describe", lab=name)
        except LabError as error:  # busy, or gone just now: the others are listed all the same
            print(f"{name}: no answer ({error})")
            continue
        spec = found["spec"]
        print(f"{name}: {spec['nodes']} x {spec['ranks_per_node']} ranks, {found['target']}")


@app.command("check", epilog=epilog("moeyard lab check"))
def check(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What this machine allows a lab to do, step by step, found by doing it. Status 1 if ranks would run unshaped."""
    from dataclasses import asdict

    from moeyard.cli.show import console, print_json, table
    from moeyard.lab.check import check as look

    steps = look()
    whole = all(step.works for step in steps if step.needed)
    if json:
        print_json({"shaped": whole, "steps": [asdict(step) for step in steps]})
    else:
        rows = table("step", "", "")
        for step in steps:
            word = "works" if step.works else "refused" if step.needed else "missing"
            rows.add_row(step.name, word, "" if step.works and step.detail.startswith("pip") else step.detail)
        console().print(rows)
        print(
            "labs run here with shaped rails"
            if whole
            else "labs run here unshaped, on loopback: see what is refused above"
        )
    raise typer.Exit(0 if whole else 1)


@app.command(
    "calibrate",
    epilog=epilog(
        "moeyard lab calibrate lab-2x2 --out ours.toml\ntorchrun --nproc-per-node 8 -m moeyard lab calibrate"
    ),
)
def calibrate(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="LAB",
            autocompletion=complete.labs,
            help="lab-2x2, lab-4x4, lab-2dc, lab-4dc, or a TOML file; under torchrun: leave out, this cluster.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The cluster file to write.")] = Path(
        "calibrated.toml"
    ),
    repeat: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 5,
    network: Network = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Measure rates, latencies, every rail and the contention law; write a cluster file with them.

    In a lab by its name or file; on a real cluster: torchrun ... -m moeyard lab calibrate.
    """
    from moeyard.cli.show import check_place, law, notice, print_json
    from moeyard.errors import MoeyardError
    from moeyard.formats.clusters import cluster_data, save_cluster
    from moeyard.lab import LabSpec
    from moeyard.lab.calibrate import calibrate as measure
    from moeyard.lab.calibrate import calibrate_here, started_by_torchrun
    from moeyard.units import show_bandwidth, show_seconds

    if spec is None and not started_by_torchrun():
        raise MoeyardError("calibrate what? name a lab, such as lab-4x4, or start this by torchrun")
    check_place("--out", out)
    if spec is not None:
        LabSpec.load(a_lab(spec))
        notice("measuring; with the start of the ranks usually half a minute")
    result = (
        calibrate_here(repeat=repeat)
        if spec is None
        else measure(a_lab(spec), repeat=repeat, network=known(network))
    )
    if result is None:
        return
    cluster, found = result
    save_cluster(cluster, out, description=f"calibrated from {spec or 'the ranks of torchrun'}")
    if json:
        print_json({"cluster": cluster_data(cluster), "measured": found})
        return
    for name, port in (("scale-up", cluster.scale_up), ("scale-out", cluster.scale_out)):
        print(f"{name}: {show_bandwidth(port.bandwidth)} per rank, {show_seconds(port.latency)} per message")
    if cluster.wan is not None:
        rate, latency = show_bandwidth(cluster.wan.bandwidth), show_seconds(cluster.wan.latency)
        print(f"wan: {rate} per datacenter, {latency} per message")
    odd = [(n, r, f) for (n, r), f in np.ndenumerate(cluster.rails) if f != 1]
    for node, rail, factor in odd:
        print(f"rail {rail} of node {node}: {factor:g} of that")
    for flows, slowdown in found.get("flows") or ():
        print(f"{flows} messages at once on a nic: {slowdown:.3f} x the time")
    print(f"law: {law(cluster.contention)}")
    print(f"written to {out}")


@app.command(
    "bench",
    epilog=epilog(
        "moeyard lab bench lab-2x2 --method gloo --method auto --repeat 3\nmoeyard lab bench lab-4x4 --out bench.json --report bench.html"
    ),
)
def bench(
    spec: Spec = "lab-4x4",
    traffic: Annotated[
        list[str] | None,
        typer.Option(
            help="zipf-local:1.2, balanced, random, zipf:1.2, hot:0.25, sparse:0.1, a traffic file, or TRACE.npz@RECORD; "
            "may be repeated; default all of the named."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=complete.methods,
            help="gloo, or a scheduler: auto, direct, ecmp, fast, lpt, rails, shot, shunt, spread, wan, waves; may be repeated; default eight.",
        ),
    ] = None,
    mb: Annotated[
        float | None,
        typer.Option(
            help="Megabytes between nodes in all; default: what the lab's nics carry in a fraction of a second."
        ),
    ] = None,
    row_bytes: Annotated[int, typer.Option(help="Bytes of a row.")] = 2048,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; methods take turns.")] = 7,
    calibrated: Annotated[
        str | None, typer.Option(help="A cluster file of `lab calibrate`: plan for it and predict by it.")
    ] = None,
    network: Network = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of a random traffic.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the figures as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a report page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time all-to-all in a lab: gloo's own and planned ones, each with its spread, times the bound and bus bandwidth."""
    from moeyard.bounds import bound
    from moeyard.cli.benched import show_bench
    from moeyard.cli.show import check_place, notice, print_json
    from moeyard.errors import UnknownName
    from moeyard.formats import load_cluster
    from moeyard.lab import LabSpec
    from moeyard.lab import bench as lab_bench
    from moeyard.lab.loads import fitting_mb, lab_traffic, standard
    from moeyard.schedulers import SCHEDULERS

    check_place("--out", out)
    check_place("--report", report)
    for name in method or ():  # before any rank starts
        if name not in ("gloo", *SCHEDULERS):
            raise UnknownName.of("method", name, ("gloo", *SCHEDULERS))
    cluster = LabSpec.load(a_lab(spec)).cluster
    mb = fitting_mb(cluster) if mb is None else mb
    traffics, methods = traffic or standard(cluster, mb, row_bytes, seed), method or lab_bench.METHODS
    least = sum(bound(cluster, lab_traffic(cluster, one, mb, row_bytes, seed)) for one in traffics)
    notice(
        f"{len(traffics)} traffics x {len(methods)} methods x {repeat} times: at least {least * len(methods) * repeat:.0f} s, and the start of the ranks"
    )
    data = lab_bench.bench(
        spec, traffics, methods, mb=mb, row_bytes=row_bytes, repeat=repeat,
        calibrated=load_cluster(calibrated) if calibrated else None, network=known(network), seed=seed,
    )  # fmt: skip
    if out is not None:
        out.write_text(dumps(data, indent=1) + "\n", encoding="utf-8")
    if report is not None:
        from moeyard.report import bench_page

        report.write_text(bench_page(data).html(), encoding="utf-8")
    if json:
        print_json(data)
    else:
        show_bench(data)


def a_lab(spec: str) -> str:
    """The name or file of a lab. A built-in cluster that no machine can act is refused."""
    from moeyard.errors import MoeyardError
    from moeyard.formats.clusters import preset_names

    own = [name for name in preset_names() if name.startswith("lab-")]
    if spec in preset_names() and spec not in own:
        raise MoeyardError(
            f"{spec} is a cluster, not a lab: one machine cannot act it; use {' or '.join(own)}, or a TOML file of your own"
        )
    return spec


def known(network: str) -> Literal["auto", "rails", "loopback"]:
    from moeyard.errors import MoeyardError

    for name in ("auto", "rails", "loopback"):
        if network == name:
            return name
    raise MoeyardError(f"--network {network!r} is none of auto, rails, loopback")
