"""Pro-Prophet's lightweight placement: hot experts to the ranks that send them most (arXiv 2411.10003)."""

from __future__ import annotations

from moeyard.arrays import IntArray, writable
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidPlacement
from moeyard.kernels.place.greedy import Times, greedy_hosts
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import STAND_IN, homes_of, mean_bandwidth, slot_cap

BALANCED = 0.5  # loads that differ by less than this part of the mean expert count as balanced


def plan_prophet(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
    left_out: int | None = None,
    alpha: float = BALANCED,
    overlap: bool = True,
) -> Placement:
    """The greedy of the paper under its own performance model; replicas serve their own rank's rows only.

    While loads differ by `alpha` of a mean expert or more: copy the heaviest expert of the most loaded rank to all ranks
    but the `left_out` that send it least; keep the prefix with the least predicted time. Without `left_out`: the best of
    none, a quarter, a half and three quarters of the ranks.
    """
    ranks = cluster.num_ranks
    if left_out is not None and not 0 <= left_out < ranks:
        raise InvalidPlacement(f"left_out is {left_out}; leave out 0 to {ranks - 1} of {ranks} ranks")
    tries = sorted({0, ranks // 4, ranks // 2, 3 * ranks // 4}) if left_out is None else [left_out]
    homes = homes_of(cluster, demand, home_E)
    times = model_times(cluster, model or STAND_IN, overlap=overlap)
    tolerance = alpha * float(demand.rows.sum()) / demand.num_experts
    found = [
        greedy_hosts(
            demand.rows, homes, writable(cluster.speed), n, tolerance, slot_cap(demand, slots), times, True
        )
        for n in tries
    ]
    hosts, _ = min(found, key=lambda one: one[1])
    return Placement(homes, hosts, "prophet")


def model_times(cluster: Cluster, model: ModelSpec, *, overlap: bool) -> Times:
    """The constants of the paper's model on this cluster, at one mean bandwidth."""
    rate = mean_bandwidth(cluster)
    return Times(
        row_crossed=model.row_bytes / rate,
        row_computed=model.row_seconds,
        gather=model.expert_bytes / rate,
        reduce=model.gradient_bytes / rate,
        non_moe_forward=model.non_moe_forward,
        non_moe_backward=model.non_moe_backward,
        overlap=overlap,
    )
