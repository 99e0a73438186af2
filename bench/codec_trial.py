"""Codecs as the training sees them: what receivers hold after a message, as tensors on any device, with the bytes that it takes.

A difference codec is a rule from (master - what receivers hold) to the part of it that a message carries. No bits are packed here:
that is the runtime's, and a test holds that both give the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD = 16  # bytes with every message: version, kind, checksum


@dataclass(frozen=True)
class Trial:
    """name: bits:1, bits:2, ternary, pick:N, topk:N, residual:N, signs:N, none, frozen, exact. block: values a scale is for.
    gain: on the scale. glide, heed: receivers go on moving as before (times glide), and take this part of a message for motion.
    every: steps between two messages. memory: False: each step's update alone is coded, what it leaves is lost."""

    name: str
    block: int = 1024
    gain: float = 1.0
    glide: float = 0.0
    heed: float = 0.0
    every: int = 1
    memory: bool = True
    share: float = 0.0  # of the rows that are computed at home, with exact weights
    held: str = "float32"
    schedule: str = "constant"

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def number(self) -> int:
        return int(self.name.partition(":")[2] or 0)

    def bytes(self, width: int, experts: int = 16) -> float:
        """Of a message for an expert of `width` values."""
        scales = 2 * -(-width // self.block)
        kind, n = self.kind, self.number
        if kind in ("none", "exact"):
            return 2.0 * width
        if kind == "frozen":
            return 0.0
        if kind == "bits":
            size = width * n / 8 + scales
        elif kind == "ternary":
            size = width / 5 + scales
        elif kind == "pick":
            size = width / n * ((n - 1).bit_length() + 1) / 8 + scales
        elif kind in ("topk", "residual"):
            size = kept(width, n) * 4.0
        elif kind == "signs":
            size = kept(width, n) * 4.0 + scales
        else:
            raise ValueError(kind)
        return (size + HEAD) / self.every


def kept(width: int, times: int) -> int:
    """Values with a 16 bit value and a 16 bit place each, so that bytes are 1 / times of bf16's."""
    return max(1, 2 * width // (4 * times))


def coded(e: torch.Tensor, trial: Trial) -> torch.Tensor:
    """[expert, width] -> what a message carries of it."""
    kind, n = trial.kind, trial.number
    if kind in ("topk", "residual"):
        k = kept(e.shape[1], n)
        index = e.abs().topk(k, dim=1, sorted=False).indices
        out = torch.zeros_like(e)
        return out.scatter_(1, index, e.gather(1, index).bfloat16().float())
    blocks = e.view(len(e), -1, trial.block)
    if kind == "pick":
        return pick(blocks, n, trial.gain).view_as(e)
    scale = (blocks.abs().mean(-1, keepdim=True) * trial.gain).bfloat16().float()
    if kind == "bits" and n == 1:
        out = torch.where(blocks < 0, -scale, scale)
    elif kind == "bits" and n == 2:  # near the best four levels of a normal law, exact in few bits
        size = torch.where(blocks.abs() < 1.25 * scale, 0.5625 * scale, 1.875 * scale)
        out = torch.where(blocks < 0, -size, size)
    elif kind == "ternary":
        out = torch.where(blocks.abs() < 0.7674 * scale, 0.0, 1.5346 * torch.where(blocks < 0, -scale, scale))
    else:
        raise ValueError(trial.name)
    return out.view_as(e)


def pick(blocks: torch.Tensor, n: int, gain: float) -> torch.Tensor:
    """Of every n values the largest, as its sign times the mean of those picked."""
    size = blocks.shape[-1]
    groups = blocks.unflatten(-1, (n, size // n))
    best = groups.abs().amax(-2, keepdim=True)
    scale = (best.mean(-1, keepdim=True) * gain).bfloat16().float()
    chosen = groups.abs().argmax(-2, keepdim=True)
    taken = groups.gather(-2, chosen)
    out = torch.zeros_like(groups)
    out.scatter_(-2, chosen, torch.where(taken < 0, -scale, scale).expand_as(taken).contiguous())
    return out.flatten(-2)


class Receivers:
    """What they hold of a stack [seed, layer, expert, ...] of masters."""

    def __init__(self, masters: torch.Tensor, trial: Trial) -> None:
        self.trial, self.shape = trial, masters.shape
        flat = masters.detach().flatten(0, 2).flatten(1)
        self.held = flat.bfloat16().float()
        self.motion = torch.zeros_like(flat) if trial.heed else None
        self.before = None if trial.memory else flat.clone()

    @torch.no_grad()
    def follow(self, masters: torch.Tensor, step: int) -> torch.Tensor:
        """A message for every expert, and what is held after it."""
        trial = self.trial
        flat = masters.detach().flatten(0, 2).flatten(1)
        if trial.name == "none" or trial.name == "exact":
            self.held = flat
        elif trial.name == "frozen" or step % trial.every:
            pass
        elif trial.kind == "residual":
            shared = masters.detach().mean(2, keepdim=True).expand(self.shape).flatten(0, 2).flatten(1)
            self.held = shared + coded(flat - shared, trial)
        elif self.before is not None:
            self.held = self.held + coded(flat - self.before, trial)
            self.before.copy_(flat)
        elif self.motion is not None:
            self.motion.mul_(trial.glide)
            guess = self.held.add_(self.motion)
            carried = coded(flat - guess, trial)
            self.motion.add_(carried, alpha=trial.heed)
            self.held = guess.add_(carried)
        else:
            self.held = self.held.add_(coded(flat - self.held, trial))
            if trial.held == "bfloat16":
                self.held = self.held.bfloat16().float()
        return self.held.view(self.shape)
