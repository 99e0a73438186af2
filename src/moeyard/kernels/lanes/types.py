"""What travels together between the kernels of the lanes form. Letters: N nodes, R ranks, G local ranks, M nics of a node."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PairRows(NamedTuple):
    """The traffic between nodes, and the lanes it divides over."""

    rows_RR: np.ndarray
    rows_NN: np.ndarray  # zero on the diagonal
    by_origin: np.ndarray  # [k, f, local origin]
    by_target: np.ndarray  # [k, f, local target]
    first_NN: np.ndarray  # the lane with which a pair's remainder starts
    to_NNM: np.ndarray  # the nic of f that lane l of k -> f enters by, -1: none
    weight_NNM: np.ndarray  # its capacity, in UNIT
    carrier_M: np.ndarray  # the local rank of each nic


class Order(NamedTuple):
    """The messages of every pair, and the stages."""

    local_stage: int  # what stays inside its node; -1: none
    after_ptr: np.ndarray
    after: np.ndarray
    pair_ptr: np.ndarray  # over pairs k * N + f
    messages: np.ndarray  # [5, message]: stage, lo, hi, balance, spread


class Prices(NamedTuple):
    """What the network takes, in seconds and bytes."""

    row_bytes: float
    row_up: float  # seconds of a row on scale-up, scale-out and wan
    row_out: float
    row_wan: float
    lat_up: float  # seconds of a message
    lat_out: float
    lat_wan: float
    nodes_per_dc: int
    law: tuple[float, float, float]  # loss, knee, ceiling
