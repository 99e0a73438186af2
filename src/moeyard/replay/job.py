"""What a replay is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from moeyard.choices import check_choices
from moeyard.cluster import Cluster
from moeyard.cost import step_floor
from moeyard.dedup import check_dedup, check_top_k
from moeyard.errors import InvalidDemand, MoeyardError, UnknownName
from moeyard.forecast import FORECASTS
from moeyard.model import ModelSpec
from moeyard.planners.compare import POLICIES
from moeyard.sim.transport import NETWORKS, Network
from moeyard.trace import Trace

ORACLE = "oracle"  # knows the record that it plans for
AHEAD = "ahead"  # as the runtime does: `place` with the last records, homes where they are
HISTORY = 8  # records that a forecast looks back
RECENT = 4  # records that the runtime looks back
METHODS = (AHEAD, *FORECASTS, ORACLE)


@dataclass(frozen=True, eq=False)
class Job:
    """The trace has the cluster's ranks (`moeyard.fold`). Replicas get at most `slots` per rank, None: no cap.

    forecast: what a placement is made from: the last records as the runtime takes them (ahead); the last one, an average (ema) or
    a trend, each as if it were certain; or oracle, the record itself.
    network: where exchange times come from, as in `layer_times`. overlap: gathers and reduces hide behind compute. dedup: rows of tokens with
    top_k choices cross to a node once, or "auto" where that pays; which are of one token is not in a trace, so it is taken as likely.
    """

    cluster: Cluster
    trace: Trace
    model: ModelSpec
    planners: tuple[str, ...] = ("static", "auto")
    schedulers: tuple[str, ...] = ("direct", "auto")
    forecast: str = AHEAD
    slots: int | None = None
    network: Network = "estimate"
    overlap: bool = True
    dedup: bool | str = False
    top_k: int = 1

    def __post_init__(self) -> None:
        if self.trace.num_ranks != self.cluster.num_ranks:
            raise InvalidDemand(
                f"the trace has {self.trace.num_ranks} ranks, the cluster {self.cluster.num_ranks}; fold it first"
            )
        if not self.planners or not self.schedulers:
            raise MoeyardError("a replay needs at least one planner and one scheduler")
        for planner in self.planners:
            check_choices(self.schedulers[0], planner, "auto")
        for scheduler in self.schedulers:
            check_choices(scheduler, self.planners[0], "auto")
        if self.forecast not in METHODS:
            raise UnknownName.of("forecast", self.forecast, METHODS)
        if self.network not in NETWORKS:
            raise UnknownName.of("network model", self.network, NETWORKS)
        check_dedup(self.dedup)
        check_top_k(self.top_k, self.trace.num_experts)

    def policy(self, planner: str) -> str:
        """Which copy serves a row: as the planner means it."""
        return POLICIES[planner]

    def floor(self, record: int) -> float:
        """Seconds of the record's layers that no placement and no network can beat."""
        demands = (self.trace.demand(record, layer) for layer in range(self.trace.num_layers))
        return sum(step_floor(self.cluster, self.model, demand) for demand in demands)

    def asked(self) -> dict[str, Any]:
        """Everything that the figures depend on, as JSON has it: two replays of the same say the same."""
        network = (
            repr(self.cluster.but(name="")),
            *(array.tobytes() for array in (self.cluster.rails, self.cluster.speed)),
        )
        return {
            "cluster": sha256(repr(network).encode()).hexdigest()[:16],
            "trace": sha256(
                repr(self.trace.counts.shape).encode() + self.trace.counts.astype("<i8").tobytes()
            ).hexdigest()[:16],
            "model": repr(self.model),
            "planners": list(self.planners),
            "schedulers": list(self.schedulers),
            "forecast": self.forecast,
            "slots": self.slots,
            "network": self.network,
            "overlap": self.overlap,
            **({"dedup": self.dedup, "top_k": self.top_k} if self.dedup else {}),
        }
