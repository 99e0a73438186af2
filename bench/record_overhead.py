"""What recording costs a training step: pairs of steps, one recorded and one not, taking turns to go first.

python -m bench.record_overhead [pairs] [--document]      --document: write the figures of docs/checkpoints.md

Once in one process on a plain transformers model, once on 4 expert-parallel ranks. Prints the median ratio of the pairs with its
quartiles, and the time spent inside the recorder as a share of the step, which noise of the machine does not touch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS, WIDTH, LAYERS, EXPERTS, SEQUENCES, LENGTH = 4, 128, 4, 16, 8, 128


def build():
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_local_experts=EXPERTS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return MixtralForCausalLM(config)


def stepper(model, optimizer, after):
    """One training step on random tokens; `after` syncs the gradients."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def step():
        tokens = torch.randint(256, (SEQUENCES, LENGTH), generator=generator)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        after()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(step, recorder_on, pairs, barrier) -> dict:
    """Ratios of recorded to unrecorded steps."""
    import numpy as np

    def timed(recorded: bool) -> tuple[float, float]:
        inside = [0.0]
        with recorder_on(recorded, inside):
            barrier()
            start = time.perf_counter()
            step()
            barrier()
            return time.perf_counter() - start, inside[0]

    for _ in range(3):
        timed(True), timed(False)
    ratios, shares, steps = [], [], []
    for i in range(pairs):
        found = {recorded: timed(recorded) for recorded in ((True, False) if i % 2 else (False, True))}
        ratios.append(found[True][0] / found[False][0])
        shares.append(found[True][1] / found[True][0])
        steps.append(found[False][0])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "pairs": pairs,
        "step_ms": round(1e3 * float(np.median(steps)), 2),
        "ratio": round(float(middle), 4),
        "quartiles": [round(float(low), 4), round(float(high), 4)],
        "inside_share": round(float(np.median(shares)), 5),
    }


def switch(model, optimizer):
    """A context: recording, with the time inside its hooks added up; or nothing."""
    from contextlib import contextmanager

    import moeyard.runtime as yr

    class Timed(yr.Recorder):
        def _from_demand(self, layer):
            return clocked(super()._from_demand(layer), self.inside)

        def _from_index(self, layer, place):
            return clocked(super()._from_index(layer, place), self.inside)

    def clocked(function, inside):
        def run(*arguments):
            start = time.perf_counter()
            function(*arguments)
            inside[0] += time.perf_counter() - start

        return run

    @contextmanager
    def on(recorded, inside):
        if not recorded:
            yield
            return
        Timed.inside = inside
        with Timed(model, optimizer, None, 1, 0, None):
            yield

    return on


def plain(pairs: int) -> dict:
    import torch

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = stepper(model, optimizer, lambda: None)
    return measure(step, switch(model, optimizer), pairs, lambda: None)


def ranks(pairs: int) -> dict:
    import torch
    import torch.distributed as dist

    import moeyard.runtime as yr

    dist.init_process_group("gloo")
    with yr.Yard() as yard:
        model = yr.parallelize(build(), yard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = stepper(model, optimizer, lambda: yr.sync_gradients(model, yard, scale=1 / yard.size))
        found = measure(step, switch(model, optimizer), pairs, dist.barrier)
        first = yard.rank == 0
    dist.destroy_process_group()
    return found if first else {}


def text(results: dict) -> str:
    inside = {kind: 100 * one["inside_share"] for kind, one in results.items()}
    return (
        f"{inside['plain']:.2f}% of a step of a plain model in one process ({results['plain']['step_ms']} ms), "
        f"{inside['ranks']:.2f}% on {RANKS} ranks ({results['ranks']['step_ms']} ms)"
    )


def main() -> int:
    document = "--document" in sys.argv
    if document:
        sys.argv.remove("--document")
    if len(sys.argv) > 2:
        import torch

        torch.set_num_threads(1)
        found = {"plain": plain, "ranks": ranks}[sys.argv[2]](int(sys.argv[1]))
        if found:
            print(json.dumps(found), flush=True)
        return 0
    pairs = sys.argv[1] if len(sys.argv) > 1 else "60"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    results = {}
    for kind, prefix in (("plain", []), ("ranks", torchrun)):
        command = [sys.executable, *prefix, __file__, pairs, kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            return done.returncode
        results[kind] = json.loads(done.stdout.strip().splitlines()[-1])
        one = results[kind]
        print(
            f"{'one process, plain model' if kind == 'plain' else f'{RANKS} expert-parallel ranks'}: step {one['step_ms']} ms, "
            f"recorded / not = {one['ratio']} (quartiles {one['quartiles'][0]} - {one['quartiles'][1]}, {one['pairs']} pairs); "
            f"inside the recorder {100 * one['inside_share']:.2f}% of the step"
        )
    print(json.dumps(results))
    if document:
        from bench.document import write_figures

        write_figures("docs/checkpoints.md", "overhead", text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
