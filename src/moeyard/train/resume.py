"""A run's folder remembers what was asked for and which modes are done: a resumed run is the same run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from moeyard.errors import InvalidFile, MoeyardError
from moeyard.formats.strict import Table, one_line, short
from moeyard.provenance import Network
from moeyard.train.options import Options

ASKED = "options.json"
DONE = "done.json"  # of a mode that has made all its steps
CHECKPOINTS = "checkpoints"
FREE = ("out", "resume", "timeout", "checkpoint_every")  # may differ: they change no figure


def begin(options: Options, where: dict[str, Any], *, writes: bool = True) -> None:
    """Before the ranks start: a resumed run must be asked for the same; a new one sets aside what an old one left.

    where: the lab and its network, or torchrun. writes: on one process only.
    """
    folder, asked = Path(options.out), _asked(options, where)
    if options.resume and (folder / ASKED).exists():
        _check_same(folder / ASKED, asked)
        load_done(options)  # a file that cannot be read is better said before the ranks start
        return
    if options.resume and any((folder / mode).exists() for mode in options.modes):
        raise InvalidFile(
            f"{folder / ASKED}: no such file, so nobody knows what this run was asked for; start anew in another --out"
        )
    if not writes:
        return
    if options.resume:
        print(f"moeyard: nothing to resume in {folder}: a new run begins", file=sys.stderr, flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoeyardError(
            f"--out {folder}: {error.strerror}; give a folder that can be made there"
        ) from error
    _set_aside(folder / "run.json")
    for mode in options.modes:
        (folder / mode / DONE).unlink(missing_ok=True)  # what it says is in run.json and the metrics
        _set_aside(folder / mode / "metrics.jsonl")
        _set_aside(folder / mode / CHECKPOINTS)
    (folder / ASKED).write_text(json.dumps(asked, indent=1), encoding="utf-8")


def _asked(options: Options, where: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in asdict(options).items() if name not in FREE}
    found: dict[str, Any] = json.loads(json.dumps(where | given))  # as it comes back from the file
    return found


def _check_same(path: Path, asked: dict[str, Any]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        keys = [*asked, *(key for key in before if key not in asked)]
        other = [key for key in keys if before.get(key) != asked.get(key)]
    except RecursionError:
        raise InvalidFile(f"{path}: not the options of a run: nested too deep") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidFile(f"{path}: not the options of a run: {error}") from error
    if other:
        told = "; ".join(
            f"{_flag(key)} was {_show(before.get(key))}, now {_show(asked.get(key))}" for key in other[:8]
        )
        raise MoeyardError(f"--resume with other options: {told}; give the same, or another --out")


def _flag(name: str) -> str:
    return {"modes": "--mode", "config": "--set"}.get(name, f"--{short(name)[1:-1].replace('_', '-')}")


def _show(value: Any) -> str:
    plain = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return (
        "not given" if value is None else plain if plain.isprintable() and len(plain) <= 200 else short(plain)
    )


def _set_aside(path: Path) -> None:
    """What an earlier run left stays, under another name: the new run must not go on from it."""
    if path.exists():
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(aside)


def save_done(options: Options, mode: str, data: dict[str, Any]) -> None:
    """The mode has made all its steps: its summary and facts, for a resumed run's table."""
    path = Path(options.out) / mode / DONE
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


def load_done(options: Options) -> dict[str, Any]:
    """Mode -> what `save_done` kept, of the modes that need no more steps; empty unless the run is resumed."""
    found: dict[str, Any] = {}
    for mode in options.modes if options.resume else ():
        path = Path(options.out) / mode / DONE
        if path.exists():
            with one_line(f"{path}: remove it to train {mode} again", model=_Done):
                found[mode] = _Done.model_validate_json(path.read_bytes()).model_dump()
    return found


class _Late(Table):
    mean: float
    worst: float
    worst_rank: int


class _Conditions(Table):
    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, str]
    accelerator: str


class _Facts(Table):
    cluster: dict[str, Any]
    network: Network
    conditions: _Conditions


class _Summary(Table):
    """Whoever shows it looks at the rest."""

    model_config = ConfigDict(extra="allow", strict=True)
    late: _Late | None
    provenance: dict[str, Any]


class _Done(Table):
    """What `run_rank` keeps of a mode."""

    summary: _Summary
    facts: _Facts
