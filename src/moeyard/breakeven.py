"""Where a choice pays: what it saves over a grid of tokens and rates, or of expert sizes and wan rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeyard.advise import Choice, newest, rows_per_rank, saving, with_tokens
from moeyard.arrays import FloatArray
from moeyard.cluster import Cluster, Port
from moeyard.model import ModelSpec
from moeyard.replay.job import Job

FACTORS = (1 / 16, 1 / 4, 1.0, 4.0)


@dataclass(frozen=True, eq=False)
class Grid:
    """saving_YX: share of today's step that the choice saves."""

    x_name: str
    y_name: str
    x: FloatArray
    y: FloatArray
    saving_YX: FloatArray


def tokens_by_rate(base: Job, choice: Choice, factors: Sequence[float] = FACTORS) -> Grid:
    """Rows per rank against the bandwidth of a nic."""
    trace = newest(base.trace, 1)
    rows = rows_per_rank(trace)
    port = base.cluster.scale_out
    saving_YX = np.array(
        [
            [
                saving(
                    replace(
                        with_tokens(replace(base, trace=trace), y),
                        cluster=base.cluster.but(scale_out=Port(port.bandwidth * x, port.latency)),
                    ),
                    choice,
                )
                for x in factors
            ]
            for y in factors
        ]
    )
    steps = np.array(factors)
    return Grid("bytes/s of a nic", "rows per rank", port.bandwidth * steps, rows * steps, saving_YX)


def experts_by_wan(base: Job, choice: Choice, factors: Sequence[float] = FACTORS) -> Grid | None:
    """Bytes of an expert against the rate of the wan; None in one datacenter."""
    wan = base.cluster.wan
    if wan is None or base.cluster.datacenters == 1:
        return None
    trace = newest(base.trace, 1)

    def at(y: float, x: float) -> float:
        cluster: Cluster = base.cluster.but(wan=Port(wan.bandwidth * x, wan.latency))
        model: ModelSpec = base.model.but(expert_bytes=max(1, round(base.model.expert_bytes * y)))
        return saving(replace(base, trace=trace, cluster=cluster, model=model), choice)

    saving_YX = np.array([[at(y, x) for x in factors] for y in factors])
    steps = np.array(factors)
    return Grid(
        "bytes/s of the wan",
        "bytes of an expert",
        wan.bandwidth * steps,
        base.model.expert_bytes * steps,
        saving_YX,
    )
