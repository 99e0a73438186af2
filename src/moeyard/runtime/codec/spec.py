"""What `Yard(codec=...)` names.

    bits:1  bits:2             dense: the sign of every difference, or one of four levels
    pick:4  :8  :16  :32       the largest of so many differences, which and its sign
    topk:N                     the largest differences of all, as many as fit into 1/N of bf16's bytes
    lossless                   every bit that changed

A difference is to what receivers hold; the sender keeps that too, so what a message leaves over is in the next difference. Coded are
hops between datacenters; with `@all` after the name, all hops.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeyard.errors import InvalidModel, UnknownName
from moeyard.model import ModelSpec

BLOCK = 1024  # values that share a scale
SEGMENT = 1 << 16  # values that a place of 16 bits is among
HEAD = 4  # words: version, kind, checksum
ROUND = 16  # words that a message is filled up to, so that it can be cut into rows
CODED_PER_SECOND = 1e9  # values that one core encodes, or decodes; python -m bench.codec --speed
LEAST_TIMES, MOST_TIMES = 2, 1024
NAMES = ("bits:1", "bits:2", "pick:4", "pick:8", "pick:16", "pick:32", "topk:32", "lossless")


@dataclass(frozen=True)
class Codec:
    """kind: bits, pick, topk or lossless. number: what stands behind the colon. everywhere: on all hops."""

    kind: str
    number: int = 0
    everywhere: bool = False

    @classmethod
    def parse(cls, text: str) -> Codec:
        name, at, where = text.partition("@")
        kind, _, number = name.partition(":")
        if at and where != "all":
            raise UnknownName.of("hops of a codec", where, ("all",))
        if kind == "residual":
            raise InvalidModel(
                f"codec {text!r}: a shared expert would have to be summed over all homes at every step; "
                f"python -m bench.codec trains with it, use bits:1 or pick:8 at the same bytes"
            )
        fits = kind == "topk" and number.isdecimal() and LEAST_TIMES <= int(number) <= MOST_TIMES
        if name not in NAMES and not fits:
            raise UnknownName.of("codec", text, NAMES)
        return cls(kind, int(number or 0), bool(at))

    @property
    def exact(self) -> bool:
        """Receivers hold the homes' weights, bit by bit."""
        return self.kind == "lossless"

    def words(self, width: int) -> int:
        """32-bit words of a message for an expert of `width` values, its head with it. Lossless: at most."""
        blocks = -(-width // BLOCK)
        if self.kind == "bits":
            body = blocks * 32 * self.number + (blocks + 1) // 2
        elif self.kind == "pick":
            body = blocks * (BLOCK // self.number // 32 * self.number.bit_length()) + (blocks + 1) // 2
        elif self.kind == "topk":
            body = sum(kept(self.number, min(SEGMENT, width - at)) for at in range(0, width, SEGMENT))
        else:
            raise InvalidModel(
                "the size of a lossless message follows from what changed; ask for its encoding"
            )
        return HEAD + body

    def filled(self, width: int) -> int:
        """The same, filled up as it travels."""
        return filled(self.words(width), ROUND)


def filled(words: int, step: int) -> int:
    return max(1, -(-words // step)) * step


def coded_model(model: ModelSpec, codec: Codec) -> ModelSpec:
    """The model as planners and the simulated step should see it where this codec carries its experts between datacenters.

    A model that says for itself what crosses is left as it is; so is one under the lossless codec, whose messages follow from what changed.
    With `@all` hops inside a datacenter are still counted whole.
    """
    if codec.exact or model.coded:
        return model
    width = _values(model)
    return model.but(wan_expert_bytes=4 * codec.filled(width), coding_seconds=width / CODED_PER_SECOND)


def _values(model: ModelSpec) -> int:
    """Weights of an expert: a row is multiplied with each once. Where that gives no dtype, the expert is taken for bf16."""
    size = model.expert_bytes / (model.expert_flops / 2)
    return model.expert_bytes // (int(size) if size in (2.0, 4.0, 8.0) else 2)


def kept(times: int, count: int) -> int:
    """Values of a segment, 16 bits and a place of 16 bits each, that take 1 / times of its bytes as bf16."""
    return max(1, count // (2 * times))
