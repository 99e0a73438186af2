"""Training text without downloads: bytes of the Python standard library's source, or of a path."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

from moeyard.errors import InvalidFile

VOCABULARY = 256
MOST = 8_000_000  # bytes


class Text:
    """A byte sequence, and the same random windows of it for the same step and rank."""

    def __init__(self, source: str | None, seed: int = 0) -> None:
        folder = Path(source) if source is not None else Path(sysconfig.get_path("stdlib"))
        self.name = str(source) if source is not None else "the Python standard library's source"
        self.seed = seed
        self.bytes = np.frombuffer(_read(folder, "*.py" if source is None else "*"), np.uint8)
        if len(self.bytes) < 2:
            raise InvalidFile(f"{folder}: {len(self.bytes)} bytes of text; give a file or folder with more")

    def batch(self, step: int, rank: int, rows: int, length: int) -> torch.Tensor:
        """tokens[rows, length + 1]: each row's last token is only a label."""
        rng = np.random.default_rng([self.seed, step, rank])
        start = rng.integers(0, max(1, len(self.bytes) - length - 1), rows)
        index = (start[:, None] + np.arange(length + 1)) % len(self.bytes)
        return torch.from_numpy(self.bytes[index].astype(np.int64))


def _read(path: Path, pattern: str) -> bytes:
    """A file, or the files of a folder in the order of their names, up to MOST bytes."""
    if path.is_file():
        return path.read_bytes()[:MOST]
    if not path.is_dir():
        raise InvalidFile(f"{path}: no such file or folder; give a text to train on")
    parts: list[bytes] = []
    size = 0
    for file in sorted(path.glob(pattern)):
        if file.is_file() and size < MOST:
            parts.append(file.read_bytes()[: MOST - size])
            size += len(parts[-1])
    return b"".join(parts)
