"""`python -m bench.mutants [--only TEXT] [--json FILE]`: every defect of the catalogue, and whether its test caught it.

First every named test runs on the tree as it is, and must pass: a test that fails anyway catches nothing. Then one defect at a
time. Caught means that the test itself failed; one that could not begin, or was skipped, has not. Kernels run as plain Python.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from bench.mutants.catalogue import MUTANTS
from bench.mutants.mutant import Mutant, problem
from bench.mutants.run import applied, copy_tree, import_ahead, run_tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name, file or test has this text")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--list", action="store_true", help="name the mutants and end")
    asked = parser.parse_args()
    chosen = [one for one in MUTANTS if any(asked.only in part for part in (one.name, one.file, one.test))]
    if problems := [text for one in MUTANTS if (text := problem(one))]:
        print("\n".join(problems), file=sys.stderr)
        return 2
    if asked.list or not chosen:
        print("\n".join(f"{one.name}  ({one.file}; {one.test})" for one in chosen) or "no such mutant")
        return 0 if chosen else 2
    import_ahead()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        rows = _try_all(chosen, copy_tree(Path(folder).resolve()))
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    caught = sum(bool(row["caught"]) for row in rows)
    print(f"{caught} of {len(rows)} defects caught")
    return 0 if caught == len(rows) else 1


def _try_all(chosen: list[Mutant], tree: Path) -> list[dict[str, object]]:
    sound = run_tests(list(dict.fromkeys(one.test for one in chosen)), tree)
    if failing := {test: outcome for test, outcome in sound.items() if outcome != "passed"}:
        print(
            f"without any defect: {failing}\n{(tree / 'log').read_text(encoding='utf-8')[-3000:]}", flush=True
        )
    rows: list[dict[str, object]] = []
    for one in chosen:
        began = time.monotonic()
        with applied(one, tree):
            outcome = run_tests([one.test], tree)[one.test]
        caught = outcome == "failed" and sound[one.test] == "passed"
        seconds = round(time.monotonic() - began, 1)
        rows.append(
            {"mutant": one.name, "file": one.file, "test": one.test, "caught": caught, "seconds": seconds}
        )
        print(f"{'caught' if caught else 'MISSED'}  {seconds:6.1f} s  {one.name}  [{one.test}]", flush=True)
        if not caught:
            print(f"        the test {outcome}; without the defect it {sound[one.test]}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
