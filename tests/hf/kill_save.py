"""Kill the ranks while they save, at random moments; a good checkpoint always remains and loads.

    python tests/hf/kill_save.py ROUNDS [SEED]

Four ranks save step after step, every value a function of the step. Some time after the first save of a round begins, either all
ranks or one of them is killed. Then two ranks load the latest checkpoint: it must be at least the last one whose save had
returned, and every value of parameters and optimizer state must be that of its step.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime"), str(HERE.parent.parent)]

import harness  # noqa: E402

RANKS, READERS, EXPERTS, WIDTH, TIMEOUT = 4, 2, 6, 48, 60.0


def parts(yard):
    import torch

    import moeyard.runtime as yr

    layer = yr.MoELayer(WIDTH, WIDTH, EXPERTS, 2, yard, dtype=torch.float64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return layer, optimizer


def tensors(layer, optimizer):
    """(tensor, ids of what its rows are) of all that a checkpoint holds."""
    for name, parameter in layer.named_parameters():
        rows = layer.own if name in layer.expert_parameter_names else range(EXPERTS)
        yield parameter.data, rows
        yield from ((optimizer.state[parameter][key], rows) for key in ("exp_avg", "exp_avg_sq"))


def values(tensor, rows, step, number):
    import torch

    start = torch.tensor([float(1000 * step + 10 * row + number) for row in rows], dtype=tensor.dtype)
    line = torch.arange(tensor[0:1].numel(), dtype=tensor.dtype).reshape(1, *tensor.shape[1:]) / 4096
    return start.reshape(-1, *(1 for _ in tensor.shape[1:])) + line


def write(rank, world, folder, log):
    """Load what is there, then save forever."""
    import moeyard.runtime as yr

    with yr.Yard(scheduler="direct", timeout=TIMEOUT) as yard:
        layer, optimizer = parts(yard)
        found = yr.latest(folder)
        step = 0 if found is None else yr.load_checkpoint(found, layer, optimizer, yard).step
        while True:
            step += 1
            for number, (tensor, rows) in enumerate(tensors(layer, optimizer)):
                tensor.copy_(values(tensor, rows, step, number))
            if rank == 0:
                _note(log, f"begins {step}")
            yr.save_checkpoint(folder, layer, optimizer, yard, step=step, keep=2)
            if rank == 0:
                _note(log, f"saved {step}")


def read(rank, world, folder):
    """The step of the latest checkpoint, every value checked."""
    import torch

    import moeyard.runtime as yr

    with yr.Yard(scheduler="direct", timeout=TIMEOUT) as yard:
        layer, optimizer = parts(yard)
        found = yr.latest(folder)
        if found is None:
            return 0
        step = yr.load_checkpoint(found, layer, optimizer, yard).step
        for number, (tensor, rows) in enumerate(tensors(layer, optimizer)):
            assert torch.equal(tensor, values(tensor, rows, step, number)), (
                f"step {step}: tensor {number} is wrong"
            )
        return step


def _note(log, line):
    with open(log, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _steps(log, word):
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(word)]


def start(place, folder, log):
    """Fork the writing ranks; their process ids."""
    children = []
    for rank in range(RANKS):
        here, child = os.getpid(), os.fork()
        if child == 0:
            code = harness.FAILED
            try:
                harness.end_with(here)
                code = harness.run_rank(write, rank, RANKS, place, TIMEOUT, {"folder": folder, "log": log})
            finally:
                os._exit(code)
        children.append(child)
    return children


def one_round(number, place, folder, log, chance, seconds):
    """Start, kill at a random moment, load. (what the kill left behind, whether all were killed)."""
    place.mkdir()
    before = len(_steps(log, "begins"))
    children = start(place, folder, log)
    end = time.monotonic() + TIMEOUT
    while len(_steps(log, "begins")) == before and time.monotonic() < end:
        time.sleep(0.002)
    if len(_steps(log, "begins")) == before:
        raise AssertionError(f"round {number}: the ranks never came to save")
    time.sleep(chance.uniform(0.0, seconds))
    everyone = chance.random() < 0.5
    for child in children if everyone else [chance.choice(children)]:
        os.kill(child, signal.SIGKILL)
    time.sleep(0.0 if everyone else chance.uniform(0.0, 0.3))
    for child in children:
        os.kill(child, signal.SIGKILL)  # not reaped yet, so still ours
        os.waitpid(child, 0)
    left = [one.name.split("-")[0] for one in Path(folder).iterdir() if one.name.startswith(".")]
    saved = max(_steps(log, "saved"), default=0)
    reading = place / "reading"
    reading.mkdir()
    harness.one_round(read, READERS, reading, TIMEOUT, {"folder": folder})
    for rank in range(READERS):
        kind, value = pickle.loads((reading / f"result{rank}").read_bytes())
        if kind == "error":
            raise AssertionError(f"round {number}, rank {rank}: {value}")
        if value < saved:
            raise AssertionError(f"round {number}: step {saved} was saved, but step {value} is the latest")
    return left, everyone


def main() -> None:
    rounds, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    import torch._dynamo  # the first optimizer would: before the forks, like the rest
    import torch.distributed  # noqa: F401

    import moeyard.runtime  # noqa: F401

    chance, found = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as top:
        folder, log = f"{top}/run", f"{top}/log"
        Path(folder).mkdir()
        for number in range(rounds):
            left, everyone = one_round(number, Path(top) / str(number), folder, log, chance, 0.4)
            found["all ranks killed" if everyone else "one rank killed"] += 1
            found["a half save left behind" if ".saving" in left else "between saves"] += 1
            found["half removed ones left behind"] += ".old" in left
    print(json.dumps({"rounds": rounds, "good checkpoint after": rounds, **found}))


if __name__ == "__main__":
    main()
