"""`python -m bench.mutants [--only TEXT] [--json FILE [--resume]] [--seconds S]`: every defect of the catalogue, and whether its
test caught it.

Each named test first runs on the tree as it is, and must pass: a test that fails anyway catches nothing. Then with the defect. Caught
means that the test itself failed, or hung; one that could not begin, or was skipped, has not. Defects outside the kernels are tried with the
kernels compiled, then those inside with kernels as plain Python, so that none is compiled anew. `--json` appends
a line for each defect, `--resume` leaves out those that it has as caught; `--seconds` starts none later.
`python -m bench.stored_figures` writes what docs/faults.md says of those in bench/results/mutants.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bench.asked import file_to_write, seconds
from bench.mutants import table
from bench.mutants.catalogue import MUTANTS
from bench.mutants.mutant import Mutant, problem
from bench.mutants.run import applied, copy_tree, import_ahead, run_tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name, file or test has this text")
    parser.add_argument("--json", type=file_to_write, help="append the rows here, a line each")
    parser.add_argument("--resume", action="store_true", help="leave out what --json has as caught")
    parser.add_argument("--seconds", type=seconds, default=float("inf"), help="start none later than this")
    parser.add_argument("--list", action="store_true", help="name the mutants and end")
    asked = parser.parse_args()
    chosen = [one for one in MUTANTS if any(asked.only in part for part in (one.name, one.file, one.test))]
    if problems := [text for one in MUTANTS if (text := problem(one))]:
        print("\n".join(problems), file=sys.stderr)
        return 2
    if asked.list or not chosen:
        print("\n".join(f"{one.name}  ({one.file}; {one.test})" for one in chosen) or "no such mutant")
        return 0 if chosen else 2
    before = table.caught(asked.json) if asked.resume and asked.json else set()
    todo = [one for one in chosen if one.name not in before]
    end, rows = time.monotonic() + asked.seconds, list[dict[str, object]]()
    for compiled in (True, False):
        some = [one for one in todo if one.file.startswith("kernels/") != compiled]
        if some:
            rows += _in_a_fork(some, asked.json, end, compiled)
    caught = sum(bool(row["caught"]) for row in rows)
    left = len(todo) - len(rows)
    print(f"{caught} of {len(rows)} defects caught" + (f"; {left} left, --resume goes on" if left else ""))
    return 0 if caught == len(rows) and (rows or not todo) else 1


def _in_a_fork(todo: list[Mutant], into: Path | None, end: float, compiled: bool) -> list[dict[str, object]]:
    """The JIT is on or off from numba's import on, so a process each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        answer = Path(folder).resolve() / "rows"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                import_ahead(compiled)
                tree = copy_tree(Path(folder).resolve() / "tree", compiled)
                answer.write_text(json.dumps(_try_all(todo, tree, into, end)), encoding="utf-8")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        os.waitpid(child, 0)
        return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else []


def _try_all(todo: list[Mutant], tree: Path, into: Path | None, end: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    sound: dict[str, str] = {}
    for one in sorted(todo, key=lambda one: one.test):
        began = time.monotonic()
        if began > end:
            break
        if one.test not in sound:
            sound |= run_tests([one.test], tree)
            if sound[one.test] != "passed":
                log = (tree / "log").read_text(encoding="utf-8")[-3000:]
                print(f"without any defect: {one.test}: {sound[one.test]}\n{log}", flush=True)
        with applied(one, tree):
            outcome = run_tests([one.test], tree)[one.test]
        caught = outcome in ("failed", "late") and sound[one.test] == "passed"
        took = round(time.monotonic() - began, 1)
        row = {"mutant": one.name, "file": one.file, "test": one.test, "caught": caught, "seconds": took}
        rows.append(row)
        if into is not None:
            with into.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{'caught' if caught else 'MISSED'}  {took:6.1f} s  {one.name}  [{one.test}]", flush=True)
        if not caught:
            print(f"        the test: {outcome}; without the defect: {sound[one.test]}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
