"""The folder of a run's checkpoints: which are whole, in what order they were saved, how one appears and old ones go.

checkpoint.json of each says when it was saved (`saved`: 1, 2, ...), which a step number does not: after a rollback the newest
checkpoint may have a smaller step. It ends with a checksum of itself and has the index's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike, short

FORMAT, PICKLED = "moeyard checkpoint 2", "moeyard checkpoint 1"
ABOUT = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?", re.ASCII)
_PART, _OLD = ".saving-", ".old-"
_LONGEST = 64 << 20  # bytes of a checkpoint.json; the homes of a million experts have less


def begin(folder: Path, step: int) -> str:
    """Make the hidden folder of a save; the name it will have."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        if left.name.startswith((_PART, _OLD)):
            _remove(left)
    name, again = f"step-{step:08d}", 2
    while (
        folder / name
    ).exists():  # saved again after going back: the older one stays until this one is whole
        name, again = f"step-{step:08d}-{again}", again + 1
    hidden(folder, name).mkdir()
    return name


def hidden(folder: Path, name: str) -> Path:
    return folder / f"{_PART}{name}"


def finish(folder: Path, name: str, about: dict[str, Any], index: tuple[str, bytes], keep: int) -> None:
    """The index and checkpoint.json, the name, and only then the end of the oldest ones."""
    part, (file, content) = hidden(folder, name), index
    put(part / file, content)
    number = 1 + max((_saved(one) for one in _complete(folder)), default=0)
    about = about | {
        "saved": number,
        "index": {"file": file, "bytes": len(content), "sha256": _sha256(content)},
    }
    put(part / ABOUT, json.dumps(about | {"sha256": _seal(about)}, indent=1).encode())
    _sync(part)
    part.rename(folder / name)
    _sync(folder)
    for old in _complete(folder)[:-keep]:
        gone = old.with_name(_OLD + old.name)
        try:
            old.rename(gone)  # at once out of every reader's sight
        except OSError as error:
            _left(old, error)
        else:
            _remove(gone)


def _remove(path: Path) -> None:
    """What nobody reads any more. Somebody may have put a link in its place: what it leads to is theirs."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        _left(path, error)


def _left(path: Path, error: OSError) -> None:
    """No reason to call a new checkpoint unsaved."""
    warnings.warn(
        f"{path}: an old checkpoint that cannot be removed: {error.strerror or error}; remove it by hand",
        stacklevel=2,
    )


def give_up(folder: Path, name: str) -> None:
    """A save that failed leaves no bytes behind."""
    shutil.rmtree(hidden(folder, name), ignore_errors=True)


def latest(folder: PathLike) -> Path | None:
    """The complete checkpoint in a folder that was saved last, if there is one."""
    found = _complete(Path(folder))
    for one in found:
        read_about(one)  # a damaged one may be the last: going on from another must be somebody's decision
    return found[-1] if found else None


def find(path: Path) -> Path:
    if (path / ABOUT).exists():
        return path
    found = latest(path)
    if found is None:
        raise InvalidFile(f"{path}: no checkpoint here (neither {ABOUT} nor a folder step-<number> with one)")
    return found


def read_about(path: PathLike) -> dict[str, Any]:
    """What stands beside the tensors: step, ranks, expert-parallel degree and the homes by module."""
    file = Path(path) / ABOUT
    try:
        with open(file, "rb") as stream:
            content = stream.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"longer than {_LONGEST} bytes")
        about = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidFile(
            f"{file}: cannot be read ({error}); is {path} a checkpoint of moeyard? If it is damaged, remove it"
        ) from error
    if not isinstance(about, dict) or about.get("format") not in (FORMAT, PICKLED):
        found = about.get("format") if isinstance(about, dict) else about
        raise InvalidFile(f"{file}: format is {short(found)}, this version reads {FORMAT!r} and {PICKLED!r}")
    if about["format"] == FORMAT and about.pop("sha256", None) != _seal(about):
        raise InvalidFile(f"{file}: its checksum is not that of its content; copy it again, or remove {path}")
    if problem := _problem(about):
        raise InvalidFile(f"{file}: {problem}")
    return about


def _problem(about: dict[str, Any]) -> str:
    for key in ("step", "ranks", "expert_parallel", *(("saved",) if about["format"] == FORMAT else ())):
        if type(about.get(key)) is not int:
            return f"{key} must be a whole number, got {short(about.get(key))}"
    homes = about.get("homes")
    fine = isinstance(homes, dict) and all(
        isinstance(one, list) and all(type(home) is int and 0 <= home < 2**31 for home in one)
        for one in homes.values()
    )
    return "" if fine else f"homes must be lists of ranks by module, got {short(homes)}"


def read_index(path: Path, about: dict[str, Any], file: str) -> bytes:
    """The index's bytes, which must be those that checkpoint.json has the checksum of."""
    known = about.get("index")
    try:
        content = (path / file).read_bytes()
    except OSError as error:
        raise InvalidFile(
            f"{path / file}: {error.strerror}; the checkpoint is not whole: copy it again"
        ) from error
    if not isinstance(known, dict) or _sha256(content) != known.get("sha256"):
        raise InvalidFile(f"{path / file}: not the index that was saved: its checksum differs; copy it again")
    return content


def _complete(folder: Path) -> list[Path]:
    """Oldest first, by the order of saving; those of 0.1, which do not tell it, by step, before all others."""
    if not folder.is_dir():
        return []
    found = [
        (_saved(one), int(match[1]), int(match[2] or 1), one)
        for one in folder.iterdir()
        if (match := _NAME.fullmatch(one.name)) and (one / ABOUT).exists()
    ]
    return [one for *_, one in sorted(found)]


def _saved(path: Path) -> int:
    """A damaged one is an old one: it must not keep a new one from being saved."""
    try:
        return int(read_about(path).get("saved", 0))
    except InvalidFile:
        return 0


def _seal(about: dict[str, Any]) -> str:
    return _sha256(json.dumps(about, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """A rename or a new file is on disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
