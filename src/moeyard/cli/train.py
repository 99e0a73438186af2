"""`moeyard train`: a small MoE, trained with plain expert parallelism and with more and more of moeyard, step by step in turn."""

from __future__ import annotations

import contextlib
import json as json_
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moeyard.cli import complete
from moeyard.cli.lab import a_lab
from moeyard.cli.show import console, print_json, table
from moeyard.errors import InvalidFile, MoeyardError, suggest
from moeyard.units import show_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from moeyard.report.load import Run
    from moeyard.train.options import Options


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Options from a TOML file; what the command line says counts more."""
    if path is None:
        return None
    known = (
        {param.name.rstrip("_"): param.name for param in context.command.params if param.name}
        if context.command
        else {}
    )
    known.pop("options", None)
    known.pop("help", None)
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFile(f"{path}: not TOML: {error}") from error
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            raise InvalidFile(f"{path}: unknown key {key!r}; {suggest(name, known)}")
        if isinstance(value, dict):
            value = [f"{field}={json_.dumps(one)}" for field, one in value.items()]
        if name == "set" and not isinstance(value, list):
            raise InvalidFile(f"{path}: set must be a table of config fields, got {value!r}")
        found[known[name]] = [value] if name == "mode" and isinstance(value, str) else value
    context.default_map = {**(context.default_map or {}), **found}
    return path


def run(
    options_: Annotated[Path | None, typer.Option("--options", metavar="FILE.toml", callback=_from_file, is_eager=True, help="Options of this command as TOML: steps = 32, [set] hidden_size = 512; the command line counts more.")] = None,
    lab: Annotated[
        str | None,
        typer.Option(autocompletion=complete.labs, help="Run in a lab: lab-2x2, lab-4x4, lab-2dc, lab-4dc, or a TOML file. Without it: under torchrun."),
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(autocompletion=complete.modes, help="plain, direct, home, replicas, shadow, prophet, domains, domains-sync, domains+codec, auto, auto+codec, sync, chunks, serial, all; both (the default): plain and moeyard, which is all; wan (the default in a lab of several datacenters): plain, direct, domains, domains+codec, auto; all-of-them, but for those with a codec. Several with commas, or repeated: they take turns.")] = None,
    skew: Annotated[str | None, typer.Option(autocompletion=complete.traces, help="Route with the skew of a trace: mixtral-8, olmoe-64 or an .npz file.")] = None,
    steps: Annotated[int, typer.Option(help="Steps in each mode.")] = 16,
    turn: Annotated[int, typer.Option(help="Steps that a mode makes before the next one's turn.")] = 2,
    links: Annotated[str, typer.Option(autocompletion=complete.these("measure", "nominal"), help="measure: plan for links measured at start (kept for a day in the cache); nominal: for the lab's file or the launcher's.")] = "measure",
    batch: Annotated[int, typer.Option(help="Sequences per rank.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens (bytes of text) of a sequence.")] = 128,
    family: Annotated[str, typer.Option(help="A Hugging Face model type: mixtral, qwen3_moe, olmoe, ...")] = "mixtral",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of its config; may be repeated.")] = None,
    text: Annotated[str | None, typer.Option(help="A file or folder to train on; default: the standard library's source.")] = None,
    planner: Annotated[str, typer.Option(autocompletion=complete.planners, help="Of moeyard, where experts get replicas: static, shadow, prophet, balanced, quota, domains or auto.")] = "quota",
    scheduler: Annotated[str, typer.Option(autocompletion=complete.schedulers, help="Of moeyard, how rows cross the network: auto, direct, ecmp, fast, lpt, rails, shot, shunt, spread, wan or waves.")] = "auto",
    slots: Annotated[int, typer.Option(min=0, help="Of moeyard: replicas that a rank has room for.")] = 1,
    codec: Annotated[str, typer.Option(help="Of the modes that have one, how experts cross between datacenters: bits:1, bits:2, pick:4 to pick:32, topk:N, residual:N, lossless; bits:1,1=pick:8 where layers differ.")] = "bits:1",
    dedup: Annotated[str, typer.Option(autocompletion=complete.these("off", "on", "auto"), help="Of moeyard, but for modes plain and direct: a token crosses to a node once. off, on, or auto: where it pays.")] = "off",
    compute: Annotated[float | None, typer.Option(help="Emulate accelerators of this many expert rows per second; default: what the lab says; 0: do not.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for metrics, checkpoints and the report.")] = Path("out/train"),
    checkpoint_every: Annotated[int, typer.Option(help="Steps; 0: only when interrupted.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoints in --out.")] = False,
    remeasure_every: Annotated[int, typer.Option(help="Measure the rails anew every so many steps; 0: never.")] = 0,
    refine: Annotated[bool, typer.Option("--refine", help="Plan for nics as the exchanges of the steps show them.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds without progress until a rail or rank counts as lost.")] = 120.0,
    network: Annotated[str, typer.Option(autocompletion=complete.these("auto", "rails", "loopback"), help="Of the lab. rails: shaped, or an error; loopback: unshaped; auto: shaped where allowed.")] = "auto",
    live: Annotated[bool, typer.Option("--live", help="Also serve a page on this machine that follows the run; its address is printed first.")] = False,
    device: Annotated[str, typer.Option(autocompletion=complete.these("auto", "cpu", "cuda"), help="Under torchrun: cpu (gloo), cuda (NCCL), or auto: GPUs where there are some.")] = "auto",
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="Let several ranks share a GPU: NCCL takes them for hosts. Every code path, not its speed.")] = False,
    dtype: Annotated[str, typer.Option(autocompletion=complete.these("float32", "bfloat16"), help="float32, or bfloat16 on float32 masters.")] = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Train a small Mixture-of-Experts model and compare plain expert parallelism with moeyard.

    In a lab (--lab lab-4x4) on this machine alone, or under torchrun on any cluster. Ends with a table and a report page.
    Ctrl-C saves a checkpoint and ends; --resume goes on from there.
    """
    from moeyard.train.modes import modes_of
    from moeyard.train.options import Options

    lab = None if lab is None else a_lab(lab)
    mode = mode or [_usual(lab)]
    options = Options(
        out=str(out.resolve()), modes=modes_of(mode), turn=turn, links=links, refine=refine, steps=steps, warmup=min(2, steps - 1), batch=batch, length=length, family=family,
        config=_fields(set_ or []), text=text, skew=skew, planner=planner, scheduler=scheduler, slots=slots, codec=codec, dedup=dedup,
        compute=_rate(lab, compute), learning_rate=learning_rate, seed=seed, checkpoint_every=checkpoint_every, resume=resume,
        remeasure_every=remeasure_every, timeout=timeout, device=device, share_gpu=share_gpu, dtype=dtype,
    )  # fmt: skip
    if lab is None:
        if live:
            raise MoeyardError("--live is for a lab; under torchrun start `moeyard watch OUT` beside it")
        _under_torchrun(options, json)
        return
    if network not in ("auto", "rails", "loopback"):
        raise MoeyardError(f"--network {network!r} is none of auto, rails, loopback")
    with _watched(out) if live else contextlib.nullcontext():
        ended = in_lab(lab, options, network, quiet=json)
    if ended["stopped"]:
        print(f"stopped; checkpoints are in {out}; go on with --resume", file=sys.stderr)
    if ended["summary"]:
        _finish(out, json)


@contextlib.contextmanager
def _watched(out: Path) -> Iterator[None]:
    """A page in a process of its own, which ends with this one: the ranks are forked from here, where there should be no threads."""
    from moeyard.lab.spaces import die_with_parent

    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "moeyard", "watch", str(out)]
    page = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        page.terminate()
        page.wait()


def _fields(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise MoeyardError(f"--set {pair!r}: write KEY=VALUE, such as hidden_size=512")
        try:
            found[key] = json_.loads(value)
        except ValueError:
            found[key] = value
    return found


def _usual(lab: str | None) -> str:
    """The modes that are compared where none are named."""
    from moeyard.lab import LabSpec

    return "both" if lab is None or LabSpec.load(lab).cluster.datacenters == 1 else "wan"


def _rate(lab: str | None, given: float | None) -> float | None:
    """Rows per second of the emulated accelerator, if any."""
    if given is not None:
        return given or None
    if lab is None:
        return None
    from moeyard.lab import LabSpec

    return LabSpec.load(lab).compute


def in_lab(lab: str, options: Options, network: str = "auto", quiet: bool = False) -> dict[str, Any]:
    """Compile, start the ranks, show their progress; what rank 0 returned. The first Ctrl-C asks them to save and end."""
    from moeyard.lab import LabSpec
    from moeyard.lab import run as run_in_lab
    from moeyard.train.job import end
    from moeyard.train.journal import STOP
    from moeyard.train.model import modules_of
    from moeyard.train.prepare import check, prepare
    from moeyard.train.resume import begin, load_done

    cluster = LabSpec.load(lab).cluster
    check(options, cluster)
    begin(options, {"lab": lab, "network": network})
    (Path(options.out) / STOP).unlink(missing_ok=True)
    done = load_done(options)
    if len(done) == len(options.modes):
        print("moeyard: every mode has made its steps; nothing is left to train", file=sys.stderr)
        return end(options, done)
    began = time.monotonic()
    out = Console(stderr=True, highlight=False, markup=False)
    if not quiet:
        out.print("compiling the planning kernels (cached for the next time) ...")
    prepare(cluster, options)
    if not quiet:
        out.print(
            f"compiled in {time.monotonic() - began:.0f} s; starting the ranks, which takes some 20 s; each step says how long is left"
        )

    def interrupt(*_: Any) -> None:
        stop = Path(options.out) / STOP
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("\nfinishing this step, then saving; once more to end at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        arguments = {
            "options": options,
            "progress": None if quiet else Bar(options.steps, len(options.modes)),
        }
        how: Any = {"network": network, "show": "first", "quiet": quiet, "modules": modules_of(options)}
        results = run_in_lab(lab, "moeyard.train.job:run_rank", arguments, **how)
    except KeyboardInterrupt:
        raise MoeyardError("interrupted; the ranks were ended without saving") from None
    finally:
        signal.signal(signal.SIGINT, before)
        (Path(options.out) / STOP).unlink(missing_ok=True)
    return dict(results[0])


def _under_torchrun(options: Options, json: bool) -> None:
    if "RANK" not in os.environ:
        raise MoeyardError(
            "neither --lab nor torchrun: write `moeyard train --lab lab-4x4`, or `torchrun --nproc-per-node 8 -m moeyard train`"
        )
    from moeyard.train.job import run_rank
    from moeyard.train.journal import STOP
    from moeyard.train.resume import begin

    first = int(os.environ["RANK"]) == 0
    begin(options, {"lab": None, "network": None}, writes=first)
    if first:
        (Path(options.out) / STOP).unlink(missing_ok=True)
    ended = run_rank(options, None if json else Bar(options.steps, len(options.modes)))
    if first and ended["summary"]:
        _finish(Path(options.out), json)


class Bar:
    """Progress on rank 0's stderr: a bar on a terminal, a line a step elsewhere. Travels to the ranks, so it starts late."""

    def __init__(self, steps: int, modes: int = 1) -> None:
        self.steps, self.modes = steps, modes
        self._left: dict[
            str, tuple[int, float]
        ] = {}  # of each mode that has begun: steps to go, seconds of the last
        self._progress: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, mode: str, entry: dict[str, Any]) -> None:
        if "event" in entry:
            self._say(f"{mode:8} step {entry['step']}: {entry['event']}: {entry['detail']}")
            return
        done = entry["step"] + 1
        line = f"loss {entry['loss']:.4f}  {show_seconds(entry['seconds'])}  {entry['tokens_per_s']:,.0f} tokens/s  {entry['x_bound']:.2f} x bound{self._to_go(mode, entry)}"
        if not sys.stderr.isatty():
            self._say(f"{mode:8} step {done}/{self.steps}  {line}")
            return
        if self._progress is None:
            columns = (
                TextColumn("{task.description:8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=Console(stderr=True, markup=False))
            self._progress.start()
        if mode not in self._tasks:
            self._tasks[mode] = self._progress.add_task(mode, total=self.steps, line="")
        self._progress.update(self._tasks[mode], completed=done, line=line)
        if done == self.steps:
            self._progress.refresh()

    def _to_go(self, mode: str, entry: dict[str, Any]) -> str:
        """As long as the last step of each mode took; who has not begun, as long as the others."""
        self._left[mode] = self.steps - entry["step"] - 1, entry["seconds"]
        known = [steps * seconds for steps, seconds in self._left.values()]
        mean = sum(seconds for _, seconds in self._left.values()) / len(known)
        left = sum(known) + (self.modes - len(known)) * self.steps * mean
        return f"  about {left:.0f} s to go" if left >= 1 else ""

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"steps": self.steps, "modes": self.modes, "_left": {}, "_progress": None, "_tasks": {}}


def _finish(out: Path, json: bool) -> None:
    """The tables, and the report page."""
    from moeyard.report import load_run, write_report
    from moeyard.report.attribution import attribution, attribution_data, mode_data
    from moeyard.report.load import coded_losses, loss_gap

    run_ = load_run(out)
    page = write_report(out)
    if json:
        data = json_.loads((out / "run.json").read_text())
        found = {"modes": mode_data(run_), "attribution": attribution_data(attribution(run_))}
        gap = loss_gap(run_)
        print_json(
            data
            | found
            | {
                "loss_difference": None if math.isnan(gap) else gap,
                "coded_losses": coded_losses(run_),
                "report": str(page),
            }
        )
        return
    shown = console()
    shown.print()
    shown.print(_comparison(run_))
    _print_attribution(shown, run_)
    shown.print(f"{run_.modes[-1].origin('iteration_s')}: {run_.conditions['network']}")
    for what in ("steps", "links", "accelerator", "memory"):
        shown.print(f"{what}: {run_.conditions.get(what, 'not told')}")
    shown.print(f"report: {page}")


def _comparison(run_: Run) -> Table:
    spare = ("?>quartiles", "?>share", "?>gather", "?>waiting", "?>balancedness", "?>tokens/s", "?>loss")
    far = [">wan MB", "?>copies over the wan"] if any("wan_bytes" in m.summary for m in run_.modes) else []
    rows = table("", ">iteration", spare[0], ">exchange", spare[1], ">x bound", *far, *spare[2:])
    for m in run_.modes:
        s = m.summary
        low, high = s.get("quartiles_s", (s["iteration_s"], s["iteration_s"]))
        rows.add_row(
            m.name, show_seconds(s["iteration_s"]), f"{low:.2f}-{high:.2f}", show_seconds(s["exchange_s"]),
            f"{s['exchange_s'] / s['iteration_s']:.0%}", f"{s['x_bound']:.2f}",
            *([f"{s['wan_bytes'] / 1e6:,.2f}", f"{s['wan_copies']:,.0f}"] if far else []), show_seconds(s["gather_s"]), show_seconds(s["wait_s"]),
            f"{s['balancedness']:.2f}", f"{s['tokens_per_s']:,.0f}", f"{s['loss']:.6f}",
        )  # fmt: skip
    return rows


def _print_attribution(shown: Console, run_: Run) -> None:
    from moeyard.report.attribution import COLUMNS, attribution, table_rows
    from moeyard.report.load import loss_gap, told_of_codecs
    from moeyard.report.run import told_by_model

    ratios = attribution(run_)
    if ratios:
        rows = table(*COLUMNS[:3], f">{COLUMNS[3]}", *(f"?>{name}" for name in COLUMNS[4:]))
        for row in table_rows(ratios):
            rows.add_row(*row)
        shown.print(rows)
    for line in told_by_model(run_):
        shown.print(line)
    if len(run_.modes) > 1:
        gap = loss_gap(run_)
        same = "the same loss" if gap <= run_.same_loss else "NOT the same loss"
        codecs = told_of_codecs(run_)
        which = "all modes without a codec" if codecs else "all modes"
        most = "a loss is no number" if math.isnan(gap) else f"largest difference over all steps {gap:.1e}"
        shown.print(f"{same} in {which} ({most})")
        for line in codecs:
            shown.print(line)
