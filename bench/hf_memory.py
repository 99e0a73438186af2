"""Peak memory of each rank while a model is built on the meta device, cut and initialised.

    python -m bench.hf_memory [--layers 4] [--hidden 768] [--inner 1536] [--experts 16] [--ranks 4] [--document]

A float32 Mixtral. The peak is the kernel's high-water mark of resident memory (VmHWM), reset before the build; the base, subtracted,
is what the process held then: an interpreter that has imported everything and built a tiny model once. Ranks are forked from a
parent that ran no torch operation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hf"))

from rounds import play  # noqa: E402

from bench.document import write_figures  # noqa: E402

LIMIT = 1.2


def text(ranks: list[dict]) -> str:
    worst = max(ranks, key=lambda found: found["peak"] / found["share"])
    return (
        f"A Mixtral of {worst['whole'] / 1e6:.0f} MB on {len(ranks)} ranks: the peak of a rank, above an interpreter that has imported everything, was at most "
        f"{worst['peak'] / worst['share']:.2f} x its own {worst['share'] / 1e6:.0f} MB."
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("layers", 4), ("hidden", 768), ("inner", 1536), ("experts", 16), ("ranks", 4)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--document", action="store_true", help="write the figures of docs/hugging-face.md")
    given = vars(options.parse_args())
    document = given.pop("document")
    (ranks,) = play([("build", given.pop("ranks"), given)], 600, prepare="memory_cases")
    for rank, found in enumerate(ranks):
        ratio = found["peak"] / found["share"]
        print(
            f"rank {rank}: peak {found['peak'] / 1e6:.0f} MB, own share {found['share'] / 1e6:.0f} MB of "
            f"{found['whole'] / 1e6:.0f} MB: {ratio:.2f} x"
        )
    if document:
        write_figures("docs/hugging-face.md", "memory", text(ranks))
    sys.exit(max(found["peak"] / found["share"] for found in ranks) > LIMIT)


if __name__ == "__main__":
    main()
