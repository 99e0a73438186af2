"""Drop-in for the placement call of DeepSeek's EPLB (github.com/deepseek-ai/EPLB): same signature, shapes, meaning.

The job: give the spare physical slots to heavy experts, each copy serving the same part of its expert's rows, and spread
the slots over gpus. Where the groups divide over the nodes, every group stays whole on one node; otherwise placement is
free. Beyond the original: never two copies of an expert on one gpu, swaps after the packing, and copy counts chosen
with the packing in view.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.arrays import FloatArray, IntArray, writable
from moeyard.errors import InvalidDemand, InvalidPlacement
from moeyard.kernels.place.rebalance import Shape, rebalance, slots_of_experts

TRIES = 6  # packings of other copy counts, while the greedy one misses the mean of the heaviest node
ROUNDS = 64  # swaps off the heaviest gpu


def rebalance_experts(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Any:
    """(physical_to_logical_map [layers, num_replicas], logical_to_physical_map [layers, experts, X], expert_count).

    weight: [layers, experts] load of each expert, a torch tensor or an array; the answer is of the same kind (int64,
    on the CPU). X is the greatest number of copies of an expert; unused places of the second map are -1. Physical slot
    p lies on gpu p // (num_replicas // num_gpus).
    """
    if not hasattr(weight, "detach"):
        return rebalance_arrays(weight, num_replicas, num_groups, num_nodes, num_gpus)
    import torch  # only who passes a tensor needs it

    table = weight.detach().to("cpu", torch.float64).numpy()
    answer = rebalance_arrays(table, num_replicas, num_groups, num_nodes, num_gpus)
    return tuple(torch.from_numpy(array) for array in answer)


def rebalance_arrays(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[IntArray, IntArray, IntArray]:
    """`rebalance_experts` on arrays."""
    table: FloatArray = np.ascontiguousarray(weight, dtype=np.float64)
    if table.ndim != 2 or 0 in table.shape:
        raise InvalidDemand(f"weight must be [layers, experts], got shape {table.shape}")
    if not (np.isfinite(table).all() and table.min() >= 0):
        layer, expert = np.argwhere(~(np.isfinite(table) & (table >= 0)))[0]
        raise InvalidDemand(
            f"weight[{layer}, {expert}] is {table[layer, expert]}; loads must be finite and zero or more"
        )
    if num_groups < 1 or num_nodes < 1 or num_groups % num_nodes:
        num_groups = num_nodes = (
            1  # the published rule: groups that do not divide over the nodes bind nothing
        )
    _check(table.shape[1], num_replicas, num_groups, num_nodes, num_gpus)
    shape = Shape(num_replicas, num_groups, num_nodes, num_gpus, TRIES, ROUNDS)
    phys: IntArray = rebalance(writable(table), shape)
    log, count = slots_of_experts(phys, table.shape[1])
    return phys, log, count


def _check(experts: int, replicas: int, groups: int, nodes: int, gpus: int) -> None:
    for what, whole, part, parts in (
        ("num_replicas", replicas, "num_gpus", gpus),
        ("num_gpus", gpus, "num_nodes", nodes),
        ("experts", experts, "num_groups", groups),
    ):
        if parts < 1 or whole < 1 or whole % parts:
            raise InvalidPlacement(f"{what} is {whole}, which {part} {parts} does not divide; use a multiple")
    if replicas < experts:
        raise InvalidPlacement(
            f"{experts} experts do not fit in {replicas} physical slots; use at least {experts}"
        )
    if replicas // gpus > experts // nodes:
        raise InvalidPlacement(
            f"{replicas // gpus} slots per gpu for {experts // nodes} experts per node would put two copies of one on a gpu; "
            f"use at most {gpus * (experts // nodes)} replicas"
        )


def balancedness_of(weight: Any, physical_to_logical: Any, num_gpus: int) -> FloatArray:
    """[layers] mean / max gpu load, each copy serving the same part of its expert's rows."""
    table = np.asarray(weight, dtype=np.float64)
    phys = np.asarray(physical_to_logical)
    layers = np.arange(len(table))[:, None]
    count = np.zeros(table.shape)
    np.add.at(count, (layers, phys), 1)
    share = np.divide(table, count, out=np.zeros_like(table), where=count > 0)
    load = share[layers, phys].reshape(len(table), num_gpus, -1).sum(axis=2)
    top = load.max(axis=1)
    found: FloatArray = np.divide(load.mean(axis=1), top, out=np.ones(len(table)), where=top > 0)
    return found
