"""What `Yard(codec=...)` names.

    bits:1  bits:2             dense: the sign of every difference, or one of four levels
    pick:4  :8  :16  :32       the largest of so many differences, which and its sign
    topk:N                     the largest differences of all, as many as fit into 1/N of bf16's bytes
    residual:N                 the same of the difference to the mean of all experts, which travels whole: the paper's codec
    lossless                   every bit that changed

A difference is to what receivers hold; the sender keeps that too, so what a message leaves over is in the next difference. `residual`
knows no past: what a message leaves over is lost, and comes again. Coded are hops between datacenters; with `@all` after the name, all
hops. Layers may differ: `bits:1,2=pick:8,3=pick:16`, or a mapping {2: "pick:8"}; where no name stands alone, other layers travel whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeyard.errors import InvalidModel, UnknownName
from moeyard.model import ModelSpec

FORMAT = 2  # of messages; ranks compare it
BLOCK = 1024  # values that share a scale
SEGMENT = 1 << 16  # values that a place of 16 bits is among
HEAD = 4  # words: version, kind, checksum
ROUND = 16  # words that a message is filled up to, so that it can be cut into rows
CODED_PER_SECOND = 1e9  # values that one core encodes, or decodes; python -m bench.codec --speed
LEAST_TIMES, MOST_TIMES = 2, 1024
NAMES = ("bits:1", "bits:2", "pick:4", "pick:8", "pick:16", "pick:32", "topk:32", "residual:16", "lossless")
_LARGEST = ("topk", "residual")


@dataclass(frozen=True)
class Codec:
    """kind: bits, pick, topk, residual or lossless. number: what stands behind the colon. everywhere: on all hops."""

    kind: str
    number: int = 0
    everywhere: bool = False

    @classmethod
    def parse(cls, text: str) -> Codec:
        name, at, where = text.partition("@")
        kind, _, number = name.partition(":")
        if at and where != "all":
            raise UnknownName.of("hops of a codec", where, ("all",))
        fits = kind in _LARGEST and number.isdecimal() and LEAST_TIMES <= int(number) <= MOST_TIMES
        if name not in NAMES and not fits:
            raise UnknownName.of("codec", text, NAMES)
        return cls(kind, int(number or 0), bool(at))

    @property
    def shares(self) -> bool:
        """Differences are to the mean of all experts."""
        return self.kind == "residual"

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
        elif self.kind in _LARGEST:
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


def written(codec: str | Mapping[int, str] | None) -> str | None:
    """As one text, as options keep it."""
    if codec is None or isinstance(codec, str):
        return codec
    if not isinstance(codec, Mapping):
        raise InvalidModel(
            f'codec is {codec!r}; give a name such as "bits:1", or names by layer, {{0: "bits:1"}}'
        )
    return ",".join(f"{layer}={name}" for layer, name in sorted(codec.items())) or None


def by_layer(text: str) -> dict[int | None, Codec]:
    """{MoE layer, from 0: its codec}; None: of all that are not named."""
    found: dict[int | None, Codec] = {}
    for part in text.split(","):
        layer, equals, name = part.rpartition("=")
        if equals and not layer.isdecimal():
            raise InvalidModel(f"codec {text!r}: {layer!r} is no layer; write bits:1,2=pick:8, layers from 0")
        key, codec = int(layer) if equals else None, Codec.parse(name)
        if key in found:
            twice = f"layer {key} has" if equals else "all layers have"
            raise InvalidModel(
                f"codec {text!r}: {twice} two; name one, or layers by number, as in bits:1,2=pick:8"
            )
        found[key] = codec
    return found


def codec_of(text: str | None, layer: int) -> Codec | None:
    """Of one layer; None: its experts travel whole."""
    codecs = {} if text is None else by_layer(text)
    return codecs.get(layer, codecs.get(None))


def coded_model(model: ModelSpec, text: str) -> ModelSpec:
    """The model as planners and the simulated step should see it where this codec carries its experts between datacenters.

    A model that says for itself what crosses is left as it is; so is one of which a layer travels whole, or by the lossless codec, whose
    messages follow from what changed. Where layers differ, the longest message counts for all. With `@all` hops inside a datacenter are
    still counted whole, and the mean that `residual` takes is not counted.
    """
    codecs = by_layer(text)
    if model.coded or None not in codecs or any(one.exact for one in codecs.values()):
        return model
    width = _values(model)
    longest = max(one.filled(width) for one in codecs.values())
    return model.but(wan_expert_bytes=4 * longest, coding_seconds=width / CODED_PER_SECOND)


def _values(model: ModelSpec) -> int:
    """Weights of an expert: a row is multiplied with each once. Where that gives no dtype, the expert is taken for bf16."""
    size = model.expert_bytes / (model.expert_flops / 2)
    return model.expert_bytes // (int(size) if size in (2.0, 4.0, 8.0) else 2)


def kept(times: int, count: int) -> int:
    """Values of a segment, 16 bits and a place of 16 bits each, that take 1 / times of its bytes as bf16."""
    return max(1, count // (2 * times))
