"""Compile what the ranks will run, once, before there are ranks: they find it on disk."""

from __future__ import annotations

import numpy as np

from moeyard.assign import assign
from moeyard.bounds import bound
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidModel
from moeyard.formats.traces import find_trace
from moeyard.kernels import build
from moeyard.kernels.codec.blocks import checksum
from moeyard.model import ModelSpec, num_experts
from moeyard.planners import place
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.sim.step import simulate_step
from moeyard.train.modes import CODED
from moeyard.train.options import Options
from moeyard.warm import warm_placements, warm_schedules


def check(options: Options, cluster: Cluster | None = None) -> None:
    """What the ranks would stumble over, said once and before there are any: the family, its fields, the text, the trace, a codec that
    no hop of the cluster would use."""
    from moeyard.runtime.codec.spec import by_layer
    from moeyard.runtime.options import Options as Planned
    from moeyard.train.model import make_config
    from moeyard.train.skew import shares
    from moeyard.train.text import Text

    config = make_config(options)
    beyond = [
        layer for layer in by_layer(options.codec) if layer is not None and layer >= config.num_hidden_layers
    ]
    if beyond:
        raise InvalidModel(
            f"codec {options.codec!r} names layer {beyond[0]}; the model has {config.num_hidden_layers}, numbered from 0"
        )
    if cluster is not None:
        for mode in set(options.modes) & set(CODED):
            Planned(codec=options.yard(mode)["codec"]).check_for(cluster)
    Text(options.text)
    if options.skew is not None:
        shares(find_trace(options.skew), 0, num_experts(config))


def prepare(cluster: Cluster, options: Options) -> None:
    """Compile what a run calls; then plan a small demand in every mode, for what only this cluster or these options call."""
    build.prepare("train")
    checksum(np.zeros(1, np.uint32))  # of parameters, when a gather begins
    traffic = warm_placements(cluster, [options.yard(mode) for mode in options.modes])
    bound(cluster, traffic)
    for scheduler in ("direct", "rails"):  # a plan of either kind is simulated beside the measured one
        simulate(cluster, schedule(cluster, traffic, scheduler))
    _warm_step(cluster)
    warm_schedules(cluster, {options.yard(mode)["scheduler"] for mode in options.modes})


def _warm_step(cluster: Cluster) -> None:
    """Trees of gathers, which replicas travel along, and the simulated step beside every measured one."""
    ranks = cluster.num_ranks
    demand = Demand(np.random.default_rng(0).integers(0, 40, (ranks, ranks)))
    model = ModelSpec(row_bytes=1024, expert_bytes=1 << 18, expert_flops=1e6, flops=1e10)
    hosts = place(cluster, demand, "quota", 1, model)
    job = assign(cluster, demand, hosts, "quota", model=model)
    for overlap in (False, True):
        simulate_step(cluster, model, hosts, job, scheduler="direct", overlap=overlap, chunks="auto")
