"""What pyproject.toml claims, tried: the lowest and the newest of every dependency, and of Python.

    python -m bench.versions [--lowest] [--newest] [--folder build/versions] [--tests PATH ...] [--json] [--store]

Makes an environment for each (venv and pip, kept in the folder and used again while its requirements are the same): `lowest` has the
oldest Python of `requires-python` and of each dependency exactly the version that `>=` names; `newest` the newest Python that is
installed here and the newest versions that pip finds. Each then runs a covering part of the tests of the core and of the
runtime. `--store` keeps what came out in bench/results/versions.json, from which `python -m bench.stored_figures` writes the README.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from bench.document import ROOT

STORED = ROOT / "bench" / "results" / "versions.json"
EXTRAS = ("torch", "hf", "lab", "train")
TOOLS = ("hypothesis", "pytest", "pytest-timeout")  # of the tests: not what is claimed
SHOWN = ("torch", "transformers", "accelerate", "safetensors", "numpy", "numba", "scipy", "pydantic", "typer")
CORE = (
    "assign", "bounds", "cli", "cost", "eplb", "estimate", "face", "flow", "formats", "old_files", "orders", "place", "saved",
    "schedulers", "simulate_command", "stages", "step", "units", "verify",
)  # fmt: skip
RUNTIME = (
    "runtime/test_exchange.py", "runtime/test_order.py", "runtime/test_replicas.py", "runtime/test_saves.py", "runtime/test_yard.py",
    "runtime/test_transport.py", "runtime/test_block.py", "hf/test_compute.py", "hf/test_parallelize.py", "train/test_train_parts.py",
    "report/test_page.py",
)  # fmt: skip
TESTS = (*(f"tests/core/test_{name}.py" for name in CORE), *(f"tests/{name}" for name in RUNTIME))


def claimed() -> tuple[str, list[str]]:
    """(the oldest Python, what is required beside it)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = [*project["dependencies"], *(one for name in EXTRAS for one in extras[name])]
    oldest = re.fullmatch(r">=(\d+\.\d+).*", project["requires-python"])
    assert oldest, project["requires-python"]
    return oldest[1], found


def requirements(which: str) -> list[str]:
    _, found = claimed()
    if which == "lowest":
        found = [re.sub(r">=([\w.]+).*", r"==\1", one) for one in found]
        assert all("==" in one for one in found), found
    return [*found, *TOOLS]


def interpreter(which: str) -> str:
    """A Python of the oldest version claimed, or the newest here that has a version not below it."""
    oldest, _ = claimed()
    minor = int(oldest.split(".")[1])
    wanted = [minor] if which == "lowest" else range(minor + 9, minor - 1, -1)
    homes = [Path(one) for one in (os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv",) if one]
    for number in wanted:
        for place in (
            shutil.which(f"python3.{number}"),
            *(str(p) for home in homes for p in home.glob(f"versions/3.{number}.*/bin/python3")),
        ):
            if (
                place
                and subprocess.run(
                    [place, "-c", "import venv, ensurepip"], capture_output=True, check=False
                ).returncode
                == 0
            ):
                return place
    raise SystemExit(f"no Python {oldest} here for {which}; install it, or name one with --python")


def environment(which: str, python: str, folder: Path) -> Path:
    """Its interpreter. Made unless it is there with the same requirements."""
    wanted = requirements(which)
    stamp = hashlib.sha256(json.dumps([python, wanted]).encode()).hexdigest()
    place = folder / f"{which}-{Path(os.path.realpath(python)).name}"
    if (place / "stamp").exists() and (place / "stamp").read_text() == stamp:
        return place / "bin" / "python"
    if not place.exists():
        subprocess.run([python, "-m", "venv", str(place)], check=True)
    own = place / "bin" / "python"
    pip = [str(own), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
    done = subprocess.run([*pip, *wanted], check=False)
    if done.returncode:
        raise SystemExit(
            f"{which}: pip cannot install {', '.join(wanted)}; no such set of versions can be claimed"
        )
    (place / "stamp").write_text(stamp)
    return place / "bin" / "python"


def versions(python: Path) -> dict[str, str]:
    code = (
        "import json, platform, sys; from importlib.metadata import version as v; "
        f"print(json.dumps({{'python': platform.python_version()}} | {{n: v(n) for n in {SHOWN!r}}}))"
    )
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return json.loads(told.stdout)


def run_tests(python: Path, tests: list[str]) -> dict[str, object]:
    """Counts of what came out, and the names of what failed."""
    began = time.monotonic()
    place = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)])}
    # Old versions warn of what new Pythons will drop: another question than whether the library works.
    flags = ["-q", "-p", "no:cacheprovider", "-W", "default", "-m", "not long"]
    given = {"cwd": ROOT, "env": os.environ | place | {"HF_HUB_OFFLINE": "1"}}
    # No test waits for a compiler.
    subprocess.run([str(python), "-m", "moeyard", "warm"], check=True, **given)
    done = subprocess.run(
        [str(python), "-m", "pytest", *flags, *tests], capture_output=True, text=True, check=False, **given
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if failed or done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], file=sys.stderr)
    seconds = round(time.monotonic() - began)
    return (
        {"passed": 0, "skipped": 0}
        | counts
        | {"wrong": failed, "status": done.returncode, "seconds": seconds}
    )


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        f"| | Python | {' | '.join(SHOWN)} | tests passed | skipped | failed |",
        "|---" * (len(SHOWN) + 5) + "|",
    ]
    for row in rows:
        told = [row["versions"][name] for name in ("python", *SHOWN)]
        lines.append(
            f"| {row['which']} | {' | '.join(told)} | {row['passed']} | {row['skipped']} | {len(row['wrong'])} |"
        )
    return "\n".join(lines)


def stored_table() -> str:
    return table(json.loads(STORED.read_text())) if STORED.exists() else "(no run is stored)"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lowest", action="store_true")
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--python", help="the interpreter, instead of looking for one")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--make", action="store_true", help="only make the environments")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store", action="store_true", help=f"keep the result in {STORED.relative_to(ROOT)}")
    given = parser.parse_args()
    chosen = [which for which in ("lowest", "newest") if getattr(given, which)] or ["lowest", "newest"]
    rows = []
    for which in chosen:
        python = environment(which, given.python or interpreter(which), given.folder.resolve())
        if given.make:
            continue
        rows.append({"which": which, "versions": versions(python)} | run_tests(python, given.tests))
        print(json.dumps(rows[-1]) if given.json else table(rows[-1:]), flush=True)
    if given.store:
        kept = {row["which"]: row for row in json.loads(STORED.read_text())} if STORED.exists() else {}
        kept |= {row["which"]: row for row in rows}
        STORED.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    return any(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
