"""Peak memory of each rank while a model is built on the meta device, cut and initialised.

    python -m bench.hf_memory [--layers 4] [--hidden 768] [--inner 1536] [--experts 16] [--ranks 4]

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

LIMIT = 1.2


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("layers", 4), ("hidden", 768), ("inner", 1536), ("experts", 16), ("ranks", 4)):
        options.add_argument(f"--{name}", type=int, default=default)
    given = vars(options.parse_args())
    (ranks,) = play([("build", given.pop("ranks"), given)], 600, prepare="memory_cases")
    for rank, found in enumerate(ranks):
        ratio = found["peak"] / found["share"]
        print(
            f"rank {rank}: peak {found['peak'] / 1e6:.0f} MB, own share {found['share'] / 1e6:.0f} MB of "
            f"{found['whole'] / 1e6:.0f} MB: {ratio:.2f} x"
        )
    sys.exit(max(found["peak"] / found["share"] for found in ranks) > LIMIT)


if __name__ == "__main__":
    main()
