"""How long a save behind the caller holds it, against a whole save: python -m bench.saves [--bytes N] [--rounds N] [--json]

One rank, parameters and AdamW's two averages; the two take turns, the figures are the ratio of the first pair, whose memory is
fresh, and the median of the later ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

import moeyard.runtime as yr
from moeyard.runtime.agree.floor import Floor


def one_round(folder, model, optimizer, yard, step):
    """(seconds of a whole save, seconds that a save behind it holds its caller)."""
    start = time.perf_counter()
    yr.save_checkpoint(folder, model, optimizer, yard, step=step, keep=1)
    whole = time.perf_counter() - start
    start = time.perf_counter()
    saving = yr.start_checkpoint(folder, model, optimizer, yard, step=step + 1, keep=1)
    held = time.perf_counter() - start
    saving.wait()
    return whole, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group = dist.group.WORLD
        yard = SimpleNamespace(
            dense_control=group, floor=lambda call, behind=False: Floor(call, group), size=1
        )
        width = 1024
        layers = max(1, int(given.bytes / (3 * 4 * width * width)))
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        times = [one_round(folder, model, optimizer, yard, 2 * i + 1) for i in range(given.rounds)]
        dist.destroy_process_group()
    first, *later = [held / whole for whole, held in times]
    ratio = statistics.median(later or [first])
    size = layers * 3 * 4 * width * width
    result = {
        "bytes": size,
        "whole": [w for w, _ in times],
        "held": [h for _, h in times],
        "first": first,
        "ratio": ratio,
    }
    if given.json:
        print(json.dumps(result))
    else:
        for whole, held in times:
            print(f"a save takes {whole:.2f} s; one behind its caller holds it {held:.2f} s")
        print(
            f"{size / 1e9:.2f} GB: held for {first:.2f} of a save at first, {ratio:.2f} later (median of {len(later)} pairs)"
        )


if __name__ == "__main__":
    main()
