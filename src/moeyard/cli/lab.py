"""`moeyard lab`: a multi-rail network on this machine, and real ranks on it."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Run ranks on an emulated multi-rail network: nodes are network namespaces, rails are shaped.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Spec = Annotated[
    str,
    typer.Argument(metavar="LAB", help="A cluster: TOML file or built-in name, such as lab-4x4 or lab-2x2."),
]
Network = Annotated[
    str,
    typer.Option(
        help="rails: shaped, or an error. loopback: unshaped. auto: rails where this machine allows it."
    ),
]
Lab = Annotated[str | None, typer.Option("--lab", help="Which lab, if several run: its name or process id.")]


@app.command("run", context_settings={"allow_interspersed_args": False})
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
) -> None:
    """Run a script on every rank, in torchrun's environment. Ends with the status of the first rank that failed.

    The ranks see the cluster in MOEYARD_LAB: a Yard without `cluster` takes it from there, rails included.
    """
    from moeyard.errors import MoeyardError
    from moeyard.lab import run_script

    script = script[1:] if script[0] == "--" else script
    if not script:
        raise MoeyardError("nothing to run; write: moeyard lab run LAB -- script.py [args]")
    for value, known in ((network, ("auto", "rails", "loopback")), (show, ("all", "first"))):
        if value not in known:
            raise MoeyardError(f"{value!r} is none of {', '.join(known)}")
    code = run_script(
        spec, script[0], script[1:], network=network, show=show, name=name, grace=grace, timeout=timeout  # type: ignore[arg-type]
    )  # fmt: skip
    raise typer.Exit(code)


@app.command("break")
def break_(node: int, rail: int, lab: Lab = None) -> None:
    """Cut a node's cable to a rail while a job runs."""
    from moeyard.lab import break_rail

    break_rail(node, rail, lab=lab)
    print(f"rail {rail} of node {node} is cut; `moeyard lab mend {node} {rail}` undoes it")


@app.command("slow")
def slow(
    node: int,
    rail: int,
    factor: Annotated[float, typer.Argument(help="0.2: a fifth of the rate.")],
    lab: Lab = None,
) -> None:
    """Slow a node's nic, both ways, while a job runs."""
    from moeyard.lab import slow_rail

    slow_rail(node, rail, factor, lab=lab)
    print(
        f"rail {rail} of node {node} runs at {factor:g} of its rate; `moeyard lab mend {node} {rail}` undoes it"
    )


@app.command("mend")
def mend(node: int, rail: int, lab: Lab = None) -> None:
    """Undo break and slow."""
    from moeyard.lab import mend_rail

    mend_rail(node, rail, lab=lab)
    print(f"rail {rail} of node {node} is as the lab's file has it")


@app.command("list")
def list_() -> None:
    """The labs that run on this machine."""
    from moeyard.lab import ask, labs

    for name in labs():
        found = ask("describe", lab=name)
        spec = found["spec"]
        print(f"{name}: {spec['nodes']} x {spec['ranks_per_node']} ranks, {found['target']}")


@app.command("check")
def check(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
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
