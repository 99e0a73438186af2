"""Host memory into which a save behind its caller copies, kept from one save to the next.

Fresh memory costs more than the copy: the system clears every page of it first. So what one save used the next one takes again if it
is about as large, and else lets go before it takes more: never more than one copy of a rank's part is held. The first save asks
for large pages, and threads touch them ahead of the copy.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from moeyard.runtime.state.logical import Held, Piece
from moeyard.runtime.weights.tensor_files import raw_bytes

Buffer = NDArray[np.uint8]
ALIGNED = 64  # bytes: any dtype may begin there
CHUNK = 16 << 20  # bytes that a thread touches together
THREADS = 4  # beyond that memory is busy


class Staging:
    """One buffer, lent to one save at a time."""

    def __init__(self) -> None:
        self._free: Buffer | None = None

    def copies(self, tensors: Mapping[str, Held]) -> tuple[dict[str, Held], Buffer]:
        """The same pieces on the host, and the buffer they lie in. From a device piece by piece: it holds nothing twice."""
        total = sum(_room(piece.values) for one in tensors.values() for piece in one.pieces)
        buffer, reached = self._take(total)
        end = 0
        found = {}
        for name, one in tensors.items():
            pieces = []
            for piece in one.pieces:
                begin, end = end, end + _room(piece.values)
                reached(end)
                pieces.append(_copy(piece, buffer[begin:end]))
            found[name] = Held(one.facts, tuple(pieces))
        return found, buffer

    def give_back(self, buffer: Buffer) -> None:
        """Nobody reads it any more."""
        self._free = buffer

    @property
    def held_bytes(self) -> int:
        return 0 if self._free is None else len(self._free)

    def _take(self, total: int) -> tuple[Buffer, Callable[[int], None]]:
        """At least so many bytes, and what waits until the first so many of them may be written."""
        free, self._free = self._free, None
        if free is not None and total <= len(free) <= total + total // 4:
            return free, lambda end: None
        del free  # before the new one is taken
        buffer = _fresh(total)
        threads = ThreadPoolExecutor(max(1, min(THREADS, os.cpu_count() or 1)), "moeyard-staging")
        touched = deque(
            (at, threads.submit(_touch, buffer[at : at + CHUNK])) for at in range(0, len(buffer), CHUNK)
        )
        threads.shutdown(wait=False)

        def reached(end: int) -> None:
            while touched and touched[0][0] < end:
                touched.popleft()[1].result()

        return buffer, reached


def _fresh(size: int) -> Buffer:
    """Zeroed by the system when it is touched, in large pages where it has them."""
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _touch(part: Buffer) -> None:
    part[:: mmap.PAGESIZE] = 0


def _room(values: torch.Tensor) -> int:
    size = values.numel() * values.element_size()
    return -(-size // ALIGNED) * ALIGNED


def _copy(piece: Piece, buffer: Buffer) -> Piece:
    values = piece.values.detach()
    buffer = buffer[: values.numel() * values.element_size()]
    copy = torch.from_numpy(buffer).view(values.dtype).reshape(values.shape)
    if values.device.type == "cpu" and values.is_contiguous():
        # On one thread: a copy waits for memory, and where cores are few or taken torch's team of threads waits for
        # itself, ten times as long as the copy takes.
        np.copyto(buffer, np.frombuffer(raw_bytes(values), np.uint8))
    else:
        copy.copy_(values)
    return Piece(piece.offset, copy)
