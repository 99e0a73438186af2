"""Memory that exchanges and replicas use again and again."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

from moeyard.runtime.agree.copies import Held


class Arena:
    """Byte buffers lent to one exchange at a time. As many exist as exchanges ever ran at once; each only grows."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """At least `size` bytes."""
        with self._lock:
            self._free.sort(key=len)
            for i, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(i)
            if self._free:
                self._free.pop()  # the largest is too small: a larger one takes its place
        return torch.empty(size + size // 4, dtype=torch.uint8, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)

    @property
    def held_bytes(self) -> int:
        return sum(len(buffer) for buffer in self._free)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


class Workspace:
    """One growing buffer per key: replicas of the layers of a model. Fillings are numbered: all ranks of a yard fill in the same order,
    so what one rank knows of the last filling all know.

    resident: each layer has a slot of its own; else two slots are used in turn. held: whose replicas are in use, from their gather
    to the reduce of their gradients. known, begun: layers called before, and the gather under way for the next call."""

    def __init__(self, resident: bool = True) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self.resident = resident
        self.turn = 0  # fillings so far
        self.filled: dict[str, int] = {}  # slot -> the number of the filling that lies there
        self.held: dict[int, Held] = {}  # by the number of their filling
        self.known: dict[int, Any] = {}
        self.begun: Any = None
        self.ahead = self.spot = 0  # gathers used that had been begun ahead, and others
        self.compared = 0  # copies found equal to their masters so far
        self.chains: dict[Any, Any] = {}  # what a codec's receivers hold, by layer
        self.loads = 0  # how often masters came from files: receivers then start anew
        # Of a codec: messages, anchors and their bytes that this rank sent, experts mended. Of all gathers: experts sent over the wan.
        self.tally: Counter[str] = Counter()

    def slot(self, site: int, turn: int) -> str:
        """Where a layer's replicas go."""
        return f"layer {site}" if self.resident and site else f"slot {turn % 2}"

    def hold(self, one: Held) -> None:
        self.held = {turn: other for turn, other in self.held.items() if self.filled.get(other.slot) == turn}
        self.held[one.turn] = one

    def release(self, one: Held) -> None:
        """Nobody computes with these any more, until somebody asks again."""
        self.held.pop(one.turn, None)

    def take(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        count = 1
        for n in shape:
            count *= n
        buffer = self._buffers.get((key, dtype, device))
        if buffer is None or buffer.numel() < count:
            with torch.inference_mode(False):  # it is used outside, too
                buffer = torch.empty(count, dtype=dtype, device=device)
            self._buffers[key, dtype, device] = buffer
        return buffer[:count].view(shape)

    def next_turn(self) -> int:
        """Whoever filled the buffers says so, and remembers the number."""
        self.turn += 1
        return self.turn

    @property
    def held_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()
        self.filled.clear()
        self.held.clear()
        self.known.clear()
        self.begun = None
        self.chains.clear()
        self.turn += 1
