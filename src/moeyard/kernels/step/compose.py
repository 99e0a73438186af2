"""The closed form of a step: an exchange, a gather and rows per rank composed to the seconds of one MoE layer.

Called by `step.search`, `moeyard.cost` and `planners.domains`. R ranks, P replicas (expert, host), sorted, homes left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.step.gather import TIERS, WAN_TIER, gather_of, gather_seconds, tier_seconds
from moeyard.kernels.step.transport import fastest, loads_of, transport

# What `compose` gives back.
DISPATCH, FORWARD, BACKWARD, GATHER, REDUCE, GATHER_LEFT, REDUCE_LEFT, NON_MOE, STEADY, TOTAL, BOUND = range(
    11
)


class Rates(NamedTuple):
    """A model as numbers, on this cluster."""

    row_bytes: float
    gather_bytes: float  # one expert on its way to a replica
    wan_gather_bytes: float  # the same between datacenters, where a codec may carry it
    coding_seconds: float  # to encode one expert for the wan, or to decode it
    reduce_bytes: float  # one expert's gradient on its way home
    row_seconds_R: np.ndarray  # forward time of one row on each rank
    non_moe_forward_R: np.ndarray
    non_moe_backward_R: np.ndarray
    overlap: bool  # gather and reduce hide behind compute
    pipelined: bool  # the experts' compute hides behind the exchanges
    backward: bool  # False: the forward alone, as in inference
    layers: float  # MoE layers of a step: its first gather and last reduce have less to hide behind


@inner
def total(seconds):
    """Of all tiers."""
    return seconds[0] + seconds[1] + seconds[2]


@inner
def left_over(seconds, level, compute, exchanges):
    """What of a gather or reduce stays exposed.

    The tiers that the exchanges hold (all up to their widest network) move only while ranks compute; the wider ones
    move under the exchanges too.
    """
    shared, free = 0.0, 0.0
    for tier in range(TIERS):
        if tier + 1 <= level:
            shared += seconds[tier]
        else:
            free += seconds[tier]
    return max(0.0, max(shared - compute, shared + free - compute - exchanges))


@inner
def one_pass(exchange, level, compute, dense, moves, rates, last):
    """(seconds, exposed, extra) of one pass of a layer: dense part, exchange, experts, exchange; `moves`: gather or reduce.

    `extra`: what a step pays once more because its first gather, or (`last`) its last reduce, has less to hide behind.
    """
    if not rates.overlap:
        left = total(moves)
        return dense + 2.0 * exchange + compute + left, left, 0.0
    if rates.pipelined:
        left = left_over(moves, level, dense, 2.0 * exchange)
        moe = max(compute, 2.0 * exchange + left)
        extra = max(compute, 2.0 * exchange) - moe + max(0.0, total(moves) - dense) if last else 0.0
        return dense + moe, left, extra
    left = left_over(moves, level, dense + compute, 2.0 * exchange)
    return dense + 2.0 * exchange + compute + left, left, left_over(moves, level, dense, exchange) - left


@kernel
def compose(exchange, moves, rows_R, rates):
    """The seconds of one MoE layer and the non-MoE part before it, by the names above.

    STEADY: one more layer of many. TOTAL: a layer's part of a step of `rates.layers` layers, its two ends included.
    """
    out = np.zeros(11)
    once, level = fastest(exchange.forms, rates.row_bytes), exchange.level
    ways = 2.0 if rates.backward else 1.0
    forward, before, after, busiest = 0.0, 0.0, 0.0, 0.0
    for r in range(len(rows_R)):
        experts = rows_R[r] * rates.row_seconds_R[r]
        dense = rates.non_moe_forward_R[r]
        forward, before = max(forward, experts), max(before, dense)
        if rates.backward:
            after = max(after, rates.non_moe_backward_R[r])
            experts, dense = 3.0 * experts, dense + rates.non_moe_backward_R[r]
        busiest = max(busiest, experts + dense)
    gather = gather_seconds(moves, rates.gather_bytes, rates.wan_gather_bytes, rates.coding_seconds)
    seconds, left, extra = one_pass(once, level, forward, before, gather, rates, np.bool_(False))
    out[DISPATCH], out[FORWARD], out[NON_MOE], out[STEADY] = once, forward, before + after, seconds
    out[GATHER], out[GATHER_LEFT] = total(gather), left
    # each way a port carries at least half of what it carries both ways
    move, wan_move = 0.5 * rates.gather_bytes, 0.5 * rates.wan_gather_bytes
    if rates.backward:
        reduce = tier_seconds(moves.forms, rates.reduce_bytes)
        seconds, left, more = one_pass(once, level, 2.0 * forward, after, reduce, rates, np.bool_(True))
        out[BACKWARD], out[REDUCE], out[REDUCE_LEFT] = 2.0 * forward, total(reduce), left
        out[STEADY] += seconds
        extra += more
        move = min(rates.gather_bytes, rates.reduce_bytes)
        wan_move = min(rates.wan_gather_bytes, rates.reduce_bytes)
    out[TOTAL] = out[STEADY] + extra / rates.layers
    busiest_tier = max(max(moves.both[0], moves.both[1]) * move, moves.both[WAN_TIER] * wan_move)
    # In one direction a port carries its rows out and its rows in, once a pass; its gathers out and its reduces in.
    out[BOUND] = max(busiest, max(ways * exchange.both * rates.row_bytes, busiest_tier))
    return out


@kernel
def rows_into(rows_RR):
    """[rank] rows that it computes."""
    rows = np.zeros(len(rows_RR))
    for src in range(len(rows_RR)):
        for host in range(len(rows_RR)):
            rows[host] += rows_RR[src, host]
    return rows


@kernel
def layer_seconds(rows_RR, expert_P, host_P, home_E, rates, ports):
    """All seconds of a layer, by the names above: rows[src, host]."""
    exchange = transport(loads_of(rows_RR, ports), ports)
    moves = gather_of(expert_P, host_P, home_E, ports)
    return compose(exchange, moves, rows_into(rows_RR), rates)
