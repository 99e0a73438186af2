"""Loops of the tests on NCCL: several ranks on one GPU, each a host of its own to NCCL.

    PYTHONPATH=src:. python bench/gpu_loops.py [--loops moved,trainer] [--limit 150]

`moved` (4 ranks): homes that move beside averages of the weights, kept state, several optimizers, shared experts (tests/runtime/test_moved.py);
losses as of experts that stay. `trainer` (2 ranks): Hugging Face's Trainer with its default, fused optimizer, in float32 and bf16
(tests/hf/test_trainer.py); losses with replicas as without. Prints the largest relative difference of each; exit status 1 if one is above its
limit or a rank failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.gpu_ranks import on_ranks, open_world

LOOPS = {"moved": 4, "trainer": 2}  # ranks
LIMITS = {"moved": 1e-9, "trainer, float32": 1e-5, "trainer, bf16": 1e-2}
ROOT = Path(__file__).resolve().parent.parent


def run(rank, options, folder, out):
    open_world(rank, options.ranks, folder)
    sys.path[:0] = [str(ROOT / "tests" / part) for part in ("hf", "runtime")]
    for name, losses in (moved if options.loops == "moved" else trainer)(rank, options.ranks):
        print(json.dumps([rank, name, losses]), file=out, flush=True)


def moved(rank, ranks):
    import moved_cases

    for case, found in moved_cases.everything(rank, ranks).items():
        if isinstance(found, dict):
            ways = found["losses"]
            yield f"moved, {case}", [one if isinstance(one, list) else [one] for one in ways]


def trainer(rank, ranks):
    import trainer_cases

    for name, narrow in (("float32", False), ("bf16", True)):
        (without, *_), (replicas, compared, *_) = trainer_cases.trainer(rank, ranks, narrow, cpu=False)
        assert compared > 0, "no replica was used"
        yield f"trainer, {name}", [without, replicas]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--limit", type=float, default=150.0)
    options = parser.parse_args()
    loops, bad = options.loops.split(","), 0
    if unknown := sorted(set(loops) - set(LOOPS)):
        parser.error(f"--loops: {', '.join(unknown)} is none of {', '.join(LOOPS)}")
    for options.loops in loops:
        options.ranks = LOOPS[options.loops]
        ended = on_ranks(__file__, options, ["loops", "limit"], run)
        if ended is None:
            return  # a rank
        left, lines = ended
        bad += any(left)
        worst = dict[str, float]()
        for _, name, (wanted, got) in map(json.loads, lines):
            off = max(abs(a - b) / abs(a) for a, b in zip(wanted, got, strict=True))
            worst[name] = max(off, worst.get(name, 0.0))
        for name, off in worst.items():
            limit = next(value for start, value in LIMITS.items() if name.startswith(start))
            bad += not off <= limit
            print(f"{'ok' if off <= limit else 'WRONG':6}{name:28} {off:.1e}")
        print(f"{options.loops}: {options.ranks} ranks left with {left}")
        bad += not worst
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
