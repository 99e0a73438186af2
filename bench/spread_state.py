"""Optimizer state at home, or spread evenly over all ranks for ever: which wins where, by the model alone.

    python -m bench.spread_state

The last record of a recorded trace, all its layers, `quota` with two slots a rank. Homes: what a gather of the replicas and a reduce of
their gradients take, nothing hidden. Spread: what scattering all gradients and sending all weights takes, once an optimizer step. Moves: homes of a
layer that would have to change at every step before spread state is cheaper than moving them.
"""

from __future__ import annotations

from statistics import mean

import numpy as np

import moeyard as my
from moeyard.cost import exchange_seconds, spread_state_seconds, step_cost
from moeyard.fold import fold
from moeyard.formats.models import load_model

CASES = (
    ("h200-4x8", "mixtral-8", "mixtral-8x7b"),
    ("h200-4x8", "olmoe-64", "olmoe-1b-7b"),
    ("dgx-h100-16x8", "olmoe-64", "olmoe-1b-7b"),
    ("two-dc-2x4x8", "olmoe-64", "olmoe-1b-7b"),
)
SLOTS = 2


def case(cluster_name: str, trace_name: str, model_name: str) -> tuple[float, float, float, int]:
    """Seconds of homes and of spread state, homes that move before the latter wins, and experts."""
    cluster = my.Cluster.load(cluster_name)
    trace = fold(my.load_trace(trace_name), cluster.num_ranks)
    model = load_model(model_name)
    homes, spread = [], []
    for layer in range(trace.num_layers):
        demand = trace.demand(-1, layer)
        placement = my.place(cluster, demand, "quota", SLOTS)
        cost = step_cost(cluster, model, placement, my.assign(cluster, demand, placement, "quota"))
        homes.append(cost.gather + cost.reduce)
        spread.append(spread_state_seconds(cluster, model, placement))
    one = np.zeros((cluster.num_ranks, cluster.num_ranks), np.int64)
    one[0, -1] = 1
    move = exchange_seconds(cluster, one, model.expert_bytes + model.optimizer_bytes)
    return mean(homes), mean(spread), max(0.0, mean(spread) - mean(homes)) / move, trace.num_experts


def table() -> str:
    lines = [
        "| cluster | trace, experts | homes: replicas gathered and reduced | state spread for ever | spread / homes | moves |",
        "|---|---|---|---|---|---|",
    ]
    found = []
    for names in CASES:
        homes, spread, moves, experts = case(*names)
        found.append((spread / homes, moves))
        lines.append(
            f"| {names[0]} | {names[1]}, {experts} | {1e3 * homes:.3g} ms | {1e3 * spread:.3g} ms | {spread / homes:.2f} | {moves:.2g} |"
        )
    least, most = min(ratio for ratio, _ in found), max(ratio for ratio, _ in found)
    if least > 1:
        said = f"At home wins in all of them, by {least:.1f} to {most:.1f} x"
    elif most < 1:
        said = f"Spread wins in all of them, by {1 / most:.1f} to {1 / least:.1f} x"
    else:
        said = f"At home wins in {sum(ratio > 1 for ratio, _ in found)} of the {len(found)}, by up to {most:.1f} x; elsewhere spread does"
    lines += [
        "",
        (
            f"{said}. Replicas that are gathered at every micro-batch, for want of resident slots, cost that often what the first column says, spread state "
            "once a step. Spread state also wins where so many homes of a layer (moves) would have to change at every step, one after another."
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
