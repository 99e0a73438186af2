"""What receivers hold of one expert, as both ends keep it: they do the same to it, so it is the same, bit by bit."""

from __future__ import annotations

from typing import Protocol

import torch

from moeyard.runtime.codec.coders import decode, encode
from moeyard.runtime.codec.exact import decode_exact, encode_exact, halves_of, values_of
from moeyard.runtime.codec.spec import Codec

_SAMPLE = 64  # of so many values one tells how far a master is away
_FAR = 0.3  # of its size: a message of a few bits would not bring receivers near; it was loaded or drawn anew, say


class HeldCopy(Protocol):
    """One expert, flat: [width]."""

    def encode(self, master: torch.Tensor) -> torch.Tensor:
        """int32 words with room for a head: how receivers get from here to there, or nearer. This copy goes along."""
        ...

    def decode(self, words: torch.Tensor) -> None: ...
    def values(self, dtype: torch.dtype) -> torch.Tensor: ...
    def strayed(self, master: torch.Tensor) -> bool:
        """Whether the master is so far away that an anchor should be sent."""
        ...


class Near:
    """In float32, whatever the weights' dtype: what a message adds may be less than a bf16 can show."""

    def __init__(self, codec: Codec, anchor: torch.Tensor) -> None:
        self.codec, self.held = codec, anchor.to(torch.float32, copy=True)
        self.finite = _finite(anchor)

    def encode(self, master: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(self.codec.words(len(master)), dtype=torch.int32, device=master.device)
        encode(self.codec, master.float().contiguous(), self.held, words)
        return words

    def decode(self, words: torch.Tensor) -> None:
        decode(self.codec, self.held, words)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.held.to(dtype)

    def strayed(self, master: torch.Tensor) -> bool:
        some = master[::_SAMPLE].float()
        far = (some - self.held[::_SAMPLE]).norm() > _FAR * some.norm()
        # A NaN, there or here, is its whole block's after a message, or nobody's; and no difference leads back from it.
        return bool(far) or not (self.finite and _finite(master))


class Residual(Near):
    """What a message says is added to the mean of all experts, not to what was held before."""

    shared: torch.Tensor  # float32 [width], set before every message

    def encode(self, master: torch.Tensor) -> torch.Tensor:
        self.held.copy_(self.shared)
        return super().encode(master)

    def decode(self, words: torch.Tensor) -> None:
        self.held.copy_(self.shared)
        super().decode(words)

    def strayed(self, master: torch.Tensor) -> bool:
        # It is always far away, and an anchor would be gone with the next message. But one expert's NaN is in the mean, so in all.
        return not _finite(self.held)


class Exact:
    """As the weights travel."""

    def __init__(self, anchor: torch.Tensor) -> None:
        self.dtype, self.device, self.width = anchor.dtype, anchor.device, len(anchor)
        self.halves = halves_of(anchor)

    def encode(self, master: torch.Tensor) -> torch.Tensor:
        now = halves_of(master.to(self.dtype))
        words = encode_exact(self.halves, now)
        self.halves = now
        return torch.from_numpy(words).to(self.device)

    def decode(self, words: torch.Tensor) -> None:
        decode_exact(self.halves, words)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return values_of(self.halves, self.width, self.dtype, self.device).to(dtype)

    def strayed(self, master: torch.Tensor) -> bool:
        return False


def _finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values.sum(dtype=torch.float32)))


def held_copy(codec: Codec, anchor: torch.Tensor) -> HeldCopy:
    """anchor: [width], in the dtype in which experts travel."""
    if codec.exact:
        return Exact(anchor)
    return Residual(codec, anchor) if codec.shares else Near(codec, anchor)
