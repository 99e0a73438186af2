"""Random clusters and traffic, small and nasty: dead and uneven rails, shared nics, lone nodes and ranks, empty blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moeyard import Cluster, Contention, Port, Traffic


@st.composite
def ports(draw, fast: bool = False) -> Port:
    bandwidth = draw(st.sampled_from([1e9, 2.5e9, 1e10] if not fast else [1e10, 4e10, 1e9]))
    return Port(bandwidth, draw(st.sampled_from([0.0, 1e-6, 1e-5])))


@st.composite
def clusters(draw, max_nodes: int = 5, max_per_node: int = 4, contention: bool = True) -> Cluster:
    nodes = draw(st.integers(1, max_nodes))
    per = draw(st.integers(1, max_per_node))
    nics = draw(st.integers(1, per))
    rails = np.ones((nodes, nics))
    for _ in range(draw(st.integers(0, 3))):
        node, nic = draw(st.integers(0, nodes - 1)), draw(st.integers(0, nics - 1))
        rails[node, nic] = draw(st.sampled_from([0.0, 0.5, 0.25, 2.0]))
    for node in range(nodes):
        if not rails[node].any():
            rails[node, draw(st.integers(0, nics - 1))] = 1.0
    datacenters = draw(st.sampled_from([d for d in (1, 2, 3) if nodes % d == 0]))
    law = Contention(0.05, 1, 2.0) if contention and draw(st.booleans()) else Contention()
    return Cluster(
        nodes,
        per,
        scale_up=draw(ports(fast=True)),
        scale_out=draw(ports()),
        nics_per_node=nics,
        datacenters=datacenters,
        wan=draw(ports()) if datacenters > 1 else None,
        rails=rails,
        contention=law,
    )


@st.composite
def traffics(draw, ranks: int) -> Traffic:
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["zero", "one", "tiny", "random", "skewed", "sparse", "hot"]))
    rows = np.zeros((ranks, ranks), np.int64)
    if kind == "one":
        rows[rng.integers(ranks), rng.integers(ranks)] = rng.integers(1, 1000)
    elif kind == "tiny":
        rows = rng.integers(0, 3, (ranks, ranks))
    elif kind == "random":
        rows = rng.integers(0, 60, (ranks, ranks))
    elif kind == "skewed":
        rows = (200 / rng.permutation(np.arange(1, ranks * ranks + 1))).astype(np.int64).reshape(ranks, ranks)
    elif kind == "sparse":
        rows = rng.integers(0, 100, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.2)
    elif kind == "hot":
        rows = rng.integers(0, 5, (ranks, ranks))
        rows[:, rng.integers(ranks)] += 40
    return Traffic(rows, draw(st.sampled_from([1, 1024, 8192])))


@st.composite
def jobs(draw, **limits) -> tuple[Cluster, Traffic]:
    """A cluster and traffic between its ranks."""
    cluster = draw(clusters(**limits))
    return cluster, draw(traffics(cluster.num_ranks))
