"""The speed and scale figures of docs/simulator.md, from what validate_simgrid.py --speed and scale_simulate.py stored.

python -m bench.simulator_figures
"""

from __future__ import annotations

import json

from bench.document import ROOT, write_figures

RESULTS = ROOT / "bench" / "results"


def text(simgrid: dict, scale: dict) -> str:
    """Both, as a list."""
    worst = max(abs(case["worst_message"]) for case in simgrid["cases"])
    lazy = max(abs(case["lazy_difference"]) for case in simgrid["cases"])
    over = max(case["lazy_overrun"] for case in simgrid["cases"])
    speed = "; ".join(
        f"{one['flows']} flows, {one['sizes']}: {one['moeyard_cpu_s']:.2f} s (SimGrid {one['simgrid_cpu_s']:.2f} s)"
        for one in simgrid["speed"]
    )
    errors = [one["makespan"] for name, one in scale.items() if name.startswith("error")]
    against = (
        f"- {len(simgrid['cases'])} cases against SimGrid's full solution: makespans differ by at most {simgrid['worst']:.0e}, messages by "
        f"{worst:.0e}. The lazy one differs by up to {lazy:.1%}, and overruns a link up to {over:.2f} times."
    )
    lines = [
        against,
        f"- Processor time of one core, merging off: {speed}.",
        f"- Where the exact answer is known, 10k flows within 0.5%: makespan {min(errors):.2%} to {max(errors):.2%} over it.",
    ]
    for name, one in scale.items():
        if name.startswith(("100k", "1000 ")):
            lines.append(
                f"- {name}: {one['messages']:,} messages, {one['simulated_operations']:,} simulated, {one['cpu_s']:.1f} s of processor, "
                f"{one['memory_bytes'] / 1e6:.0f} MB."
            )
    return "\n".join(lines)


def main() -> None:
    simgrid, scale = (
        json.loads((RESULTS / name).read_text()) for name in ("simgrid.json", "scale_simulate.json")
    )
    write_figures("docs/simulator.md", "scale", text(simgrid, scale))


if __name__ == "__main__":
    main()
