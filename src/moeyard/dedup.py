"""Whether a token should cross to a node once: from counts, by the loads of ports. Planners, the step's model and the runtime all ask here.

dedup: True where told so, False never, "auto" where it pays. top_k: choices of a token; one crosses once anyway.
"""

from __future__ import annotations

from moeyard.arrays import IntArray
from moeyard.assign import assign
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.cost import exchange_seconds
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, UnknownName
from moeyard.estimate import copy_seconds
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.traffic import Traffic

CHOICES = (True, False, "auto")
WORTH = 0.8  # of the time of rows each for itself, from which on crossing once is worth it: packing, copies and sums cost the host


def check_dedup(dedup: object) -> None:
    if not (isinstance(dedup, (bool, str)) and dedup in CHOICES):
        raise UnknownName.of("dedup", str(dedup), [str(one) for one in CHOICES])


def check_top_k(top_k: object, experts: int) -> None:
    if type(top_k) is not int or not 1 <= top_k <= experts:
        raise InvalidDemand(
            f"top_k is {top_k!r}: a token chooses at least 1 of these {experts} experts, and none twice"
        )


def may_cross_once(cluster: Cluster, dedup: bool | str, top_k: int) -> bool:
    """A token with one choice crosses once anyway, as does one inside a node."""
    return bool(dedup) and top_k > 1 and cluster.nodes > 1


def pays(cluster: Cluster, dedup: bool | str, served: Assignment, top_k: int, row_bytes: int) -> bool:
    """Whether rows cross once: told so, or likely to take less than each for itself, if a token's choices know nothing of one another."""
    if not may_cross_once(cluster, dedup, top_k):
        return False
    if dedup is True:
        return True
    once_RR, fan_RR = served.likely(top_k)
    return quicker(cluster, served.rows_RR, once_RR, fan_RR, row_bytes)


def quicker(
    cluster: Cluster, plain_RR: IntArray, once_RR: IntArray, fan_RR: IntArray, row_bytes: int
) -> bool:
    """Whether rows that cross once and are handed round take less than rows that cross each for itself."""
    return once_seconds(cluster, once_RR, fan_RR, row_bytes) < WORTH * exchange_seconds(
        cluster, plain_RR, row_bytes
    )


def once_seconds(cluster: Cluster, once_RR: IntArray, fan_RR: IntArray, row_bytes: int) -> float:
    """Of rows that cross once and are then handed round inside a node."""
    return exchange_seconds(cluster, once_RR, row_bytes) + copy_seconds(cluster, fan_RR, row_bytes)


def likely_traffic(
    cluster: Cluster, dedup: bool | str, served: Assignment, top_k: int, row_bytes: int
) -> Traffic:
    """What is sent of these rows: once where it pays, as the tokens say or as is likely."""
    once = pays(cluster, dedup, served, top_k, row_bytes)
    return served.traffic(row_bytes, dedup=once, top_k=top_k)


def model_for_planners(
    cluster: Cluster, model: ModelSpec, demand: Demand, home_E: IntArray, dedup: bool | str, top_k: int
) -> ModelSpec:
    """The model with rows of fewer bytes, where rows cross once: by as much as their exchange gains with every expert at home. Planners weigh
    hundreds of placements by rows each for itself; how much of them is sent differs little between them."""
    if not may_cross_once(cluster, dedup, top_k):
        return model
    served = assign(cluster, demand, Placement.of_homes(home_E, cluster.num_ranks), "home")
    plain = exchange_seconds(cluster, served.rows_RR, model.row_bytes)
    if plain == 0.0 or not pays(cluster, dedup, served, top_k, model.row_bytes):
        return model
    once = once_seconds(cluster, *served.likely(top_k), model.row_bytes)
    return model.but(row_bytes=max(1, round(model.row_bytes * once / plain)))


def rows_apart(cluster: Cluster, rows_RR: IntArray) -> int:
    """Of these rows, those between nodes."""
    return int(rows_RR[cluster.node_R[:, None] != cluster.node_R].sum())
