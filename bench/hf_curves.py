"""100 training steps on 8 ranks against one process: the loss curves of a Mixtral, a Qwen3-MoE and a DeepSeek-V3.

    python -m bench.hf_curves [--steps 100] [--ranks 8] [--document]

float64, AdamW, clipping. The ranks: 6 experts on 8 ranks, replicas, gradient checkpointing, two micro-batches a step. One process: the
unmodified model on the whole batch. Prints each family's first and last loss and the largest relative difference of any step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hf"))

from rounds import play  # noqa: E402

from bench.document import write_figures  # noqa: E402

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
LIMIT = 1e-6


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--document", action="store_true", help="write the figure of docs/hugging-face.md")
    given = options.parse_args()
    worst = 0.0
    for family in FAMILIES:
        start = time.monotonic()
        arguments = {"family": family, "steps": given.steps, "sequences": given.ranks}
        one, many = play(
            [("curve", 1, arguments), ("curve", given.ranks, arguments)], 1800, prepare="curve_cases"
        )
        difference = max(abs(a - b) / a for a, b in zip(one[0], many[0], strict=True))
        worst = max(worst, difference)
        print(
            f"{family}: {given.steps} steps, loss {one[0][0]:.4f} -> {one[0][-1]:.4f}; {given.ranks} ranks differ by "
            f"at most {difference:.1e} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    print(f"largest difference {worst:.1e}, limit {LIMIT:.0e}")
    if given.document:
        said = f"{given.steps} steps on {given.ranks} ranks: the largest relative difference of a step's loss was {worst:.1e}"
        write_figures("docs/hugging-face.md", "curves", said)
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
