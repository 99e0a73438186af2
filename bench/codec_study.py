"""Training with receivers that hold decoded experts, beside training with exact ones: the runs of `python -m bench.codec`."""

from __future__ import annotations

import math
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch

from bench.codec_model import Sizes, initial, mean_loss
from bench.codec_trial import Receivers, Trial

RATE, WARM, BALANCE = 1e-3, 20, 0.01
JUDGED = 5  # held-out losses, over the last tenth of the steps, that are averaged


def text() -> np.ndarray:
    parts = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    return np.frombuffer(b"".join(parts)[:8_000_000], np.uint8)


def windows(data, seeds, step, rows, length, held_out=False):
    """tokens[seed, row, length + 1]. The last tenth of the text is for judging."""
    cut = len(data) * 9 // 10
    first, last = (cut, len(data)) if held_out else (0, cut)
    out = []
    for seed in seeds:
        rng = np.random.default_rng([seed, step + 1, int(held_out)])
        start = rng.integers(first, last - length - 1, rows)
        out.append(data[start[:, None] + np.arange(length + 1)].astype(np.int64))
    return torch.from_numpy(np.stack(out))


def train(
    sizes: Sizes, trial: Trial, seeds: list[int], steps: int, device: torch.device, data, log=None
) -> dict:
    """Losses per seed: held out, with the masters, averaged over the last tenth; and of the training, as its rows were computed."""
    began = time.monotonic()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dense, masters = initial(sizes, seeds, device)
    masters = {name: one.requires_grad_() for name, one in masters.items()}
    parameters = [*dense.values(), *(masters.values() if trial.name != "frozen" else ())]
    optimizer = torch.optim.AdamW(
        parameters, lr=RATE, weight_decay=0.01, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    receivers = {name: Receivers(one, trial) for name, one in masters.items()}
    judged_by = windows(data, [10**6] * len(seeds), 0, sizes.held_out, sizes.length, True).to(device)
    held = {
        name: one.follow(masters[name], 0) if trial.name in ("none", "exact") else one.held.view(one.shape)
        for name, one in receivers.items()
    }
    judged, seen = [], []
    points = {steps - 1 - round(i * steps / 10 / (JUDGED - 1)) for i in range(JUDGED)}
    batches = [windows(data, seeds, step, sizes.rows, sizes.length).to(device) for step in range(steps)]
    for step in range(steps):
        part = min(1.0, (step + 1) / WARM)
        if trial.schedule == "cosine":
            part *= 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * part
        used = {name: one.detach().to(dtype).requires_grad_() for name, one in held.items()}
        exact = (
            {name: one.detach().to(dtype).requires_grad_() for name, one in masters.items()}
            if trial.share
            else None
        )
        loss, balance = mean_loss(sizes, dense, used, batches[step], exact, trial.share)
        (loss + BALANCE * balance).sum().backward()
        for name, master in masters.items():
            master.grad = used[name].grad.float()
            if exact is not None:
                master.grad += exact[name].grad.float()
        optimizer.step()
        optimizer.zero_grad()
        held = {name: one.follow(masters[name], step + 1) for name, one in receivers.items()}
        seen.append(loss.detach())
        if step in points:
            with torch.no_grad():
                whole = {name: one.detach().to(dtype) for name, one in masters.items()}
                judged.append(mean_loss(sizes, dense, whole, judged_by)[0])
    width = sizes.width * sizes.inner * 3
    return {
        "trial": trial.__dict__,
        "held_out": torch.stack(judged).mean(0).tolist(),
        "training": torch.stack(seen[-max(1, steps // 10) :]).mean(0).tolist(),
        "message_bytes": trial.bytes(width),
        "against_bf16": 2 * width / trial.bytes(width) if trial.bytes(width) else None,
        "seeds": list(seeds),
        "steps": steps,
        "seconds": time.monotonic() - began,
    }
