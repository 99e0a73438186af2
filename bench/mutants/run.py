"""Run one test in a copy of the tree, in a fork of a process that has imported what is slow to import."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.ending import end_with
from bench.mutants.mutant import ROOT, Mutant

COPIED = ("src", "tests", "bench", "docs", "examples", "pyproject.toml", "README.md", "ARCHITECTURE.md")
OBJECTS = "src/moeyard/kernels/__pycache__/objects"
PATIENCE = 240  # seconds a test may take before it is late: a defect may be a hang


def copy_tree(into: Path, compiled: bool) -> Path:
    """What tests need, with or without compiled kernels."""
    into.mkdir(exist_ok=True)
    if compiled:
        shutil.copytree(ROOT / OBJECTS, into / OBJECTS, dirs_exist_ok=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__", "out")
            shutil.copytree(ROOT / name, into / name, ignore=leave, dirs_exist_ok=True)
        else:
            shutil.copy2(ROOT / name, into / name)
    return into


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    """The tree with the defect in it."""
    path = tree / mutant.path
    text = path.read_text(encoding="utf-8")
    _rewrite(path, text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        _rewrite(path, text)


def _rewrite(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # Python takes a compiled file for the source's by time and size, and both may be the old ones.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def import_ahead(compiled: bool) -> None:
    """What costs seconds and is none of ours, once for all forks. Not what pytest rewrites: it would complain."""
    os.environ["NUMBA_DISABLE_JIT"] = "0" if compiled else "1"
    os.environ["MOEYARD_STEPS"] = "12"  # of the longest oracle
    for name in ("numba", "scipy.sparse", "pytest", "pydantic", "typer.testing", "torch.distributed"):
        try:
            importlib.import_module(name)
        except ImportError:
            print(
                f"no {name.partition('.')[0]} here: tests that need it are skipped, and their mutants not caught"
            )
    assert not any(name.partition(".")[0] == "moeyard" for name in sys.modules), (
        "a fork would not see the defect"
    )


def run_tests(tests: Sequence[str], tree: Path) -> dict[str, str]:
    """Node id -> passed | failed | late | skipped | broken (before it began) | absent. A parametrized test failed if one of it did."""
    answer, log = tree / "answer.json", tree / "log"
    answer.unlink(missing_ok=True)
    campaign, child = os.getpid(), os.fork()
    if child == 0:
        end_with(campaign)
        _become(tests, tree, answer, log)
    end = time.monotonic() + PATIENCE * len(tests)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, 9)  # it leads a group of its own
            os.waitpid(child, 0)
            return dict.fromkeys(tests, "late")
        time.sleep(0.05)
    if not answer.exists():
        return dict.fromkeys(tests, "broken")
    reports = json.loads(answer.read_text(encoding="utf-8"))
    return {test: _outcome(test, reports) for test in tests}


def _become(tests: Sequence[str], tree: Path, answer: Path, log: Path) -> None:
    """In the child: run pytest there, leave what it found, and end without returning."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.chdir(tree)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.path[:] = [str(tree / "src"), str(tree / "tests"), str(tree), *filter(_foreign, sys.path)]
        for name in [one for one in sys.modules if one.partition(".")[0] == "bench"]:
            del sys.modules[name]  # the copy's are meant
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # for the processes that tests start
        import pytest

        listener = _Listener()
        # Kernels run as plain Python: a hash of 64 bits that wraps round is no flaw.
        wraps = ["-W", "ignore:overflow encountered:RuntimeWarning"]
        flags = ["-q", "-x" if len(tests) == 1 else "-q", "-p", "no:cacheprovider", *wraps]
        pytest.main([*tests, *flags], plugins=[listener])
        answer.write_text(json.dumps(listener.reports), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _foreign(path: str) -> bool:
    """Not the tree that the copy was made from."""
    return bool(path) and Path(path).resolve() not in (ROOT, ROOT / "src", ROOT / "tests")


class _Listener:
    def __init__(self) -> None:
        self.reports: list[tuple[str, str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append((report.nodeid, report.when, report.outcome))


def _outcome(test: str, reports: Sequence[Sequence[str]]) -> str:
    own = [(when, outcome) for node, when, outcome in reports if node == test or node.startswith(f"{test}[")]
    if not own:
        return "absent"
    if any(outcome == "failed" for _, outcome in own):  # in its set-up too: ranks may be started there
        return "failed"
    return "passed" if ("call", "passed") in own else "skipped"
