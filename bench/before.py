"""No plan of one datacenter takes longer than it did in 0.1, by simulation.

    python -m bench.before                every cell of bench.quality up to 16 nodes, and a fixed sample of those above
    python -m bench.before --nodes 16     up to 16 nodes alone

bench/golden/simulated.json has, for each cell and scheduler, the plan's digest (its first eight letters) and its simulated time over bound
as of 0.1. A plan that is still the same takes as long as before; the others are simulated. One may be half a percent longer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import moeyard as my
from bench.quality import NAMES, Cell, cells, simulated

KEPT = Path(__file__).parent / "golden" / "simulated.json"
SLACK = 1.005
ALL, EVERY = 16, 7  # nodes up to which every cell is looked at; above, one in so many


def chosen(most_nodes: int) -> list[Cell]:
    found = list(cells(most_nodes))
    above = [cell for cell in found if cell.nodes > ALL]
    return [cell for cell in found if cell.nodes <= ALL] + above[::EVERY]


def longer(cell: Cell, kept: dict[str, list[str | float]], names: tuple[str, ...]) -> tuple[list[str], int]:
    """What of this cell takes longer than it did, and how many plans have changed."""
    cluster, traffic = cell.job()
    known = {str(digest): float(ratio) for digest, ratio in kept.values()}  # type: ignore[arg-type]
    found, changed = [], 0
    for name in names:
        digest, before = my.schedule(cluster, traffic, name).digest[:8], float(kept[name][1])
        if digest != kept[name][0]:
            changed += 1
            now = known[digest] if digest in known else simulated(cell, name)
            known[digest] = now
            print(f"{cell}: {name} {before} is now {now}", flush=True)
            if now > SLACK * before:
                found.append(f"{cell}: {name} took {before} x bound, takes {now}")
    return found, changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=128, help="largest cluster, in nodes")
    parser.add_argument("--from-nodes", type=int, default=0, help="smallest cluster, in nodes")
    parser.add_argument("--schedulers", nargs="+", default=NAMES, choices=NAMES, help="those to look at")
    options = parser.parse_args()
    kept = json.loads(KEPT.read_text())
    problems, plans, changed = [], 0, 0
    for cell in chosen(options.nodes):
        if str(cell) in kept and cell.nodes >= options.from_nodes:
            found, more = longer(cell, kept[str(cell)], tuple(options.schedulers))
            problems += found
            plans += len(options.schedulers)
            changed += more
    for line in problems:
        print(line)
    print(
        f"{plans} plans, {changed} changed, {len(problems)} longer than before by more than {SLACK - 1:.1%}"
    )
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
