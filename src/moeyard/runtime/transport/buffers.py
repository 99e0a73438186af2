"""Memory that exchanges and replicas use again and again."""

from __future__ import annotations

import threading

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
    """One growing buffer per key: what the layers of a model share. Fillings are numbered: all ranks of a yard fill in the same order,
    so what one rank knows of the last filling all know. `held`: whose replicas lie here and are in use, from their gather to the
    reduce of their gradients."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self.filled = 0  # the number of the filling that lies here
        self.held: Held | None = None
        self.compared = 0  # copies found equal to their masters so far

    def take(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        count = 1
        for n in shape:
            count *= n
        buffer = self._buffers.get((key, dtype, device))
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count, dtype=dtype, device=device)
            self._buffers[key, dtype, device] = buffer
        return buffer[:count].view(shape)

    def next_turn(self) -> int:
        """Whoever filled the buffers says so, and remembers the number."""
        self.filled += 1
        return self.filled

    @property
    def held_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()
        self.held = None
        self.filled += 1
