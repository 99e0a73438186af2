"""What planning beside the training costs a step: the same step with and without it, in turn, under routing that does not change.

    python -m bench.planning [--lab lab-2x2] [--pairs 30] [--json]

A small Mixtral as in `moeyard train`, mode `all`, in a lab with emulated accelerators; every step has the same tokens and the same choices,
so plans stay as they are. With planning, each call plans the layer's next one on a side thread; without, the plan there is stays. Printed:
the ratio of the two step times, its median and 95% interval, and the seconds that the main thread waited for plans, of the step. Exit
status 1 where the interval reaches 1.04 or the wait 1%.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from typing import Any

import numpy as np

from moeyard.lab import LabSpec
from moeyard.lab import run as run_in_lab
from moeyard.report.attribution import interval
from moeyard.train.model import modules_of
from moeyard.train.options import Options
from moeyard.train.prepare import prepare

WARMUP = 3
MOST_RATIO, MOST_WAIT = 1.04, 0.01


def on_rank(options: Options, pairs: int) -> dict[str, Any]:
    """[pair, (without, with)] seconds of the step and of waiting for plans, on this rank."""
    import torch.distributed as dist

    from moeyard.runtime import Yard
    from moeyard.runtime.transport.detect import lab_place
    from moeyard.train.device import open_world
    from moeyard.train.loop import Trainer

    place = lab_place()
    open_world(options, in_lab=True)
    with Yard(cluster="measure", timeout=options.timeout) as yard:
        cluster = yard.cluster
    trainer = Trainer(options, "all", place, cluster)
    tokens = trainer.text.batch(0, dist.get_rank(), options.batch, options.length)
    seconds, waited = np.zeros((2, pairs, 2))

    def step() -> tuple[float, float]:
        forecasts = trainer.yard.forecasts
        trainer.demands.begin(0)
        trainer.yard.settle()
        began, before = time.monotonic(), forecasts.waited
        trainer._step(0, tokens)
        trainer.yard.settle()
        return time.monotonic() - began, forecasts.waited - before

    for _ in range(WARMUP):
        step()
    for pair in range(pairs):
        for planning in (0, 1) if pair % 2 else (1, 0):
            trainer.yard.forecasts.steady = not planning
            seconds[pair, planning], waited[pair, planning] = step()
    trainer.yard.forecasts.steady = False
    trainer.close()
    dist.destroy_process_group()
    return {"seconds": seconds, "waited": waited}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="lab-2x2")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument(
        "--compute",
        type=float,
        default=None,
        help="rows/s of an emulated accelerator; default: the lab's, or 12000",
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    spec = LabSpec.load(asked.lab)
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            folder, modes=("all",), skew="mixtral-8", compute=asked.compute or spec.compute or 12_000.0
        )
        prepare(spec.cluster, options)
        arguments = {"options": options, "pairs": asked.pairs}
        found = run_in_lab(
            asked.lab,
            "bench.planning:on_rank",
            arguments,
            network="rails",
            quiet=True,
            modules=modules_of(options),
        )
    seconds = np.max([one["seconds"] for one in found], axis=0)
    waited = np.max([one["waited"] for one in found], axis=0)
    ratio = seconds[:, 1] / seconds[:, 0]
    low, high = interval(ratio)
    share = float(np.median(waited[:, 1] / seconds[:, 1]))
    result = {
        "lab": asked.lab, "pairs": asked.pairs, "step_s": float(np.median(seconds[:, 1])), "ratio": float(np.median(ratio)),
        "low": None if math.isnan(low) else low, "high": None if math.isnan(high) else high, "waits": share,
    }  # fmt: skip
    if asked.json:
        print(json.dumps(result))
    else:
        print(
            f"{asked.lab}, {asked.pairs} pairs of steps of {result['step_s']:.2f} s: with planning {result['ratio']:.3f} x the time without "
            f"(95%: {low:.3f} to {high:.3f}); the slowest rank's main thread waits for plans {share:.2%} of a step"
        )
    sys.exit(not high < MOST_RATIO or share > MOST_WAIT)  # NaN: too few pairs to tell


if __name__ == "__main__":
    main()
