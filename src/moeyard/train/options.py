"""What a training run is asked to do. Imports no torch: the command line reads it first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from moeyard.choices import check_choices
from moeyard.errors import MoeyardError, UnknownName
from moeyard.train.modes import CODEC, CODED, MODES

LINKS = ("measure", "nominal")

DEVICES = ("auto", "cpu", "cuda")
DEDUP = {"off": False, "on": True, "auto": "auto"}  # as a yard is told
DTYPES = {"float32": 4, "bfloat16": 2}  # bytes of a value


@dataclass(frozen=True)
class Options:
    """Everything that the ranks need to know; the same on each."""

    out: str
    modes: tuple[str, ...] = ("plain", "moeyard")
    steps: int = 16
    warmup: int = 2  # first steps that count for the loss but not for the times
    batch: int = 8  # sequences per rank
    length: int = 128  # tokens of a sequence
    family: str = "mixtral"
    config: dict[str, Any] = field(default_factory=dict)  # fields of the Hugging Face config
    text: str | None = None  # a file or folder; None: the standard library's source
    skew: str | None = None  # a trace whose distribution over the experts the routing follows
    planner: str = "quota"
    scheduler: str = "auto"
    policy: str = "quota"
    slots: int | None = 1
    codec: str = CODEC  # of the modes that have one
    dedup: str = "off"  # a token crosses to a node once: on, off, or auto where it pays
    compute: float | None = None  # rows per second of an emulated accelerator; None: as fast as it goes
    learning_rate: float = 1e-3
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 0
    resume: bool = False
    remeasure_every: int = 0  # steps; 0: only after a rail was lost
    timeout: float = 120.0
    links: str = (
        "measure"  # plan for links measured at start, or for the "nominal" ones of the lab or the launcher
    )
    refine: bool = False  # plan for nics as the exchanges of the steps show them
    turn: int = 2  # steps that a mode makes before the next one's turn
    device: str = "auto"  # cpu (gloo), cuda (NCCL), or what is there; a lab is cpu
    share_gpu: bool = False  # more ranks on a machine than it has GPUs
    dtype: str = "float32"  # what is computed in; masters are float32
    # step, break | slow | mend, node, rail, factor; break wan | slow wan | mend wan: datacenter, 0, seconds or factor
    faults: tuple[tuple[int, str, int, int, float], ...] = ()

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in MODES:
                raise UnknownName.of("mode", mode, MODES)
        for what, least in (
            ("steps", 1),
            ("warmup", 0),
            ("batch", 1),
            ("length", 2),
            ("turn", 1),
            ("checkpoint_every", 0),
            ("remeasure_every", 0),
        ):
            if getattr(self, what) < least:
                raise MoeyardError(f"{what} must be at least {least}, got {getattr(self, what)}")
        if self.links not in LINKS:
            raise UnknownName.of("kind of links", self.links, LINKS)
        for what, known in (("device", DEVICES), ("dtype", DTYPES), ("dedup", DEDUP)):
            if getattr(self, what) not in known:
                raise UnknownName.of(what, getattr(self, what), known)
        check_choices(self.scheduler, self.planner, self.policy)
        rates = {"timeout": self.timeout, "learning_rate": self.learning_rate, "compute": self.compute}
        for what, value in rates.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise MoeyardError(f"{what} must be positive and finite, got {value}")

    def yard(self, mode: str) -> dict[str, Any]:
        """How a mode plans: options of `Yard`, and `ahead`."""
        own = {
            "scheduler": self.scheduler,
            "planner": self.planner,
            "policy": self.policy,
            "slots": self.slots,
            "dedup": DEDUP[self.dedup],
        }
        coded = {"codec": self.codec} if mode in CODED else {}
        return own | MODES[mode][1] | coded

    @property
    def tokens(self) -> int:
        """Per rank and step."""
        return self.batch * self.length
