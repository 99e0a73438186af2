"""How a yard plans: the same on every rank, and compared before anything is sent."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from moeyard.choices import check_choices
from moeyard.cluster import Cluster
from moeyard.dedup import check_dedup
from moeyard.errors import InvalidCluster, UnknownName
from moeyard.model import ModelSpec
from moeyard.runtime.agree.digests import cluster_digest, small_digest
from moeyard.runtime.codec.spec import FORMAT, by_layer, coded_model, written
from moeyard.version import __version__


@dataclass(frozen=True)
class Options:
    """scheduler: of exchanges. planner, slots, policy: which experts get replicas, and which copy serves a row. transport:
    None for the backend's own. checked: replicas are compared with their homes before every use, which all ranks do or none. ahead:
    replicas are planned from past counts and gathered a layer ahead; without overlap gathers and reduces of the same plans run in the foreground. resident: each layer keeps memory for its own. chunks: parts of the
    tokens whose exchanges hide behind one another's experts, 1, 2, or "auto" where the model says that two pay. dedup: a token crosses
    to a node once and is handed round there, "auto" where the cluster's ports say that it pays. codec: how experts travel between
    datacenters, or on all hops, in which layer; None: whole. most_rows: that a rank may receive at once; beyond it tokens go in parts."""

    scheduler: str = "auto"
    planner: str = "static"
    slots: int | None = None
    policy: str = "auto"
    model: ModelSpec | None = None
    transport: str | None = None
    checked: bool = False
    ahead: bool = True
    resident: bool = True
    chunks: int | str = 1
    dedup: bool | str = False
    codec: str | None = None
    most_rows: int | None = None
    overlap: bool = True

    @cached_property
    def costed(self) -> ModelSpec | None:
        """The model that plans are made for: experts cross between datacenters as the codec sends them."""
        if self.model is None or self.codec is None:
            return self.model
        return coded_model(self.model, self.codec)

    @property
    def plans_ahead(self) -> bool:
        return self.ahead and self.planner != "static"

    @property
    def overlaps(self) -> bool:
        return self.overlap and self.plans_ahead

    def __post_init__(self) -> None:
        check_choices(self.scheduler, self.planner, self.policy)
        if self.chunks not in (1, 2, "auto"):
            raise UnknownName.of("chunks", str(self.chunks), ("1", "2", "auto"))
        check_dedup(self.dedup)
        object.__setattr__(self, "codec", written(self.codec))
        if self.most_rows is not None and self.most_rows < 1:
            raise InvalidCluster(
                f"most_rows is {self.most_rows}; give at least one row, or None for no limit"
            )
        if self.codec is not None:
            by_layer(self.codec)

    def check_for(self, cluster: Cluster) -> Self:
        """These options. A codec that no hop would use is a mistake."""
        if self.codec is None or cluster.datacenters > 1:
            return self
        if not all(one.everywhere for one in by_layer(self.codec).values()):
            everywhere = ",".join(f"{part.removesuffix('@all')}@all" for part in self.codec.split(","))
            raise InvalidCluster(
                f"codec {self.codec!r} is for hops between datacenters, and the cluster has one; write {everywhere} for all hops"
            )
        return self

    def digest(self, cluster: Cluster | None) -> int:
        """What ranks compare: the version, the cluster and all of this."""
        network = 0 if cluster is None else cluster_digest(cluster)
        return small_digest(
            __version__, network, self.scheduler, self.planner, self.slots, self.policy, self.model, self.transport,
            self.checked, self.ahead, self.resident, self.chunks, self.dedup, self.codec, FORMAT, self.most_rows,
            self.overlap,
        )  # fmt: skip


SWITCH = "MOEYARD"  # environment: off sends everything by torch's own all-to-all, experts at home
OFF = "moeyard: MOEYARD=off: torch's own all-to-all carries all rows, experts stay at home; plans only count rows"


def switched_off() -> bool:
    value = os.environ.get(SWITCH, "on").lower()
    if value not in ("on", "off"):
        raise UnknownName.of(SWITCH, value, ("on", "off"))
    return value == "off"


def in_force(options: Options) -> Options:
    """The options as given, or what MOEYARD=off leaves of them: a user's first question when something looks odd."""
    if not switched_off():
        return options
    return replace(
        options,
        scheduler="direct",
        planner="static",
        slots=None,
        transport="collective",
        chunks=1,
        dedup=False,
        codec=None,
    )
