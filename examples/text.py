"""Training text without downloads: the standard library's own source, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256


def read(files: int = 40) -> torch.Tensor:
    """One long tensor of bytes."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:files]
    return torch.tensor(list(b"".join(file.read_bytes() for file in sources)), dtype=torch.int64)


def batch(text: torch.Tensor, step: int, rank: int, sequences: int, length: int) -> torch.Tensor:
    """This rank's sequences of a step; other steps and ranks get others."""
    generator = torch.Generator().manual_seed(step * 4099 + rank)
    starts = torch.randint(len(text) - length, (sequences,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])
