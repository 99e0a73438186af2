"""Host memory into which a save behind its caller copies, kept from one save to the next.

Fresh memory costs more than the copy: the system clears every page of it first. So what one save used the next one takes again,
and what it does not take is let go: never more than one copy of a rank's part is held.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from moeyard.runtime.state.logical import Held, Piece
from moeyard.runtime.weights.tensor_files import raw_bytes

Buffers = list[NDArray[np.uint8]]


class Staging:
    """Free buffers by their bytes."""

    def __init__(self) -> None:
        self._free: dict[int, Buffers] = {}

    def copies(self, tensors: Mapping[str, Held]) -> tuple[dict[str, Held], Buffers]:
        """The same pieces on the host, and the buffers they lie in. From a device piece by piece: it holds nothing twice."""
        taken: Buffers = []
        found = {
            name: Held(one.facts, tuple(self._copy(piece, taken) for piece in one.pieces))
            for name, one in tensors.items()
        }
        self._free.clear()
        return found, taken

    def give_back(self, buffers: Buffers) -> None:
        """Nobody reads them any more."""
        for one in buffers:
            self._free.setdefault(len(one), []).append(one)

    def _copy(self, piece: Piece, taken: Buffers) -> Piece:
        values = piece.values.detach()
        size = values.numel() * values.element_size()
        free = self._free.get(size)
        buffer = free.pop() if free else np.empty(size, np.uint8)
        taken.append(buffer)
        copy = torch.from_numpy(buffer).view(values.dtype).reshape(values.shape)
        if values.device.type == "cpu" and values.is_contiguous():
            # On one thread: a copy waits for memory, and where cores are few or taken torch's team of threads waits for
            # itself, ten times as long as the copy takes.
            np.copyto(buffer, np.frombuffer(raw_bytes(values), np.uint8))
        else:
            copy.copy_(values)
        return Piece(piece.offset, copy)
