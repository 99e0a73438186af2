"""What this hardware really does: a ModelSpec and link rates, measured where the model runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moeyard.cluster import Cluster, Port
from moeyard.errors import InvalidModel
from moeyard.model import ModelSpec
from moeyard.runtime.block import grouped_experts
from moeyard.runtime.layers.device import to_device
from moeyard.runtime.layers.experts import MoELayer
from moeyard.runtime.roles import Links
from moeyard.runtime.transport.api import Bare
from moeyard.runtime.transport.links import datacenter_on, nodes_on
from moeyard.traffic import Traffic


def measure(
    model: nn.Module, yard: Links, *, step: Callable[[], Any] | None = None, rows: int = 2048, repeat: int = 5
) -> ModelSpec:
    """Profile the model's MoE layers on this rank's device; every rank calls it and gets the slowest rank's figures.

    Row and expert bytes from the parameters; expert time from `rows` rows over the first layer's home experts, forward. With
    `step` (one forward and backward of the whole model, which the ranks run together), the rest of its time per layer is the
    non-MoE time, a third of it forward; without, that is zero.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers:
        raise InvalidModel("the model has no MoELayer to measure; make one with moeyard.runtime.MoELayer")
    layer = layers[0]
    inner, hidden = layer.down.shape[2], layer.down.shape[1]
    weights = 3 * hidden * inner
    size = layer.down.element_size()
    flops = 2.0 * weights
    seconds = _slowest(_expert_seconds(layer, yard, rows, repeat), yard)
    rate = flops * rows / seconds
    forward = backward = 0.0
    if step is not None:
        total, inside = _step_seconds(layers, step, yard, repeat)
        rest = max(0.0, _slowest(total - inside, yard)) / len(layers)
        forward, backward = rest / 3, rest * 2 / 3
    return ModelSpec(
        row_bytes=hidden * size,
        expert_bytes=weights * size,
        expert_flops=flops,
        flops=rate,
        non_moe_forward=forward,
        non_moe_backward=backward,
        layers=len(layers),
        activation_bytes=(hidden + 3 * inner) * size,
    )


def measure_links(yard: Links, *, rows_bytes: int = 1 << 20, repeat: int = 5) -> Cluster:
    """The yard's cluster with measured scale-up, scale-out and wan rates, alike on every rank.

    Each network is timed by a ring of messages, all ranks at once: once tiny (latency), once `rows_bytes` long (bandwidth). All ranks of a
    datacenter share its wan port. A network that does not exist (one rank per node, one node) keeps its figures.
    """
    cluster, per = yard.cluster, yard.cluster.ranks_per_node
    found: dict[str, Port] = {}
    rank_R = np.arange(yard.size)
    inside = rank_R // per * per + (rank_R + 1) % per
    far, members = cluster.datacenters > 1, yard.size // cluster.datacenters
    for name, there, target, sharing in (
        ("scale_up", per > 1, inside, 1),
        ("scale_out", cluster.nodes_per_datacenter > 1, nodes_on(cluster, 1), 1),
        ("wan", far, datacenter_on(cluster), members),
    ):
        if not there:
            continue
        tiny = _ring_seconds(yard, target, 8, repeat)
        long = _ring_seconds(yard, target, rows_bytes, repeat)
        found[name] = Port(sharing * rows_bytes / max(long - tiny, 1e-9), tiny)
    return cluster.but(**found)


def remeasure(yard: Links, *, size: int = 1 << 19, repeat: int = 3) -> Cluster:
    """The yard's cluster with every nic's factor and the wan's rate as they are now, alike on every rank: for what became slow, or fast.

    In turn k every node sends `size` bytes on each rail to the node k places on in its datacenter, all at once. A nic's rate is that of its
    best message, sent or received: a healthy one has at least one healthy partner (with two nodes both ends of a slow rail
    count as slow, which plans alike). Factors are relative to the cluster's scale-out rate and never above 1; within a
    tenth of 1 they are 1. A dead nic stays dead. The wan's rate is the slowest port's; within a tenth it is as it was.
    """
    cluster, per = yard.cluster, yard.cluster.ranks_per_node
    best = np.zeros(cluster.rails.shape)
    carrier_R = np.zeros(yard.size, np.bool_)
    carrier_R[(np.arange(cluster.nodes)[:, None] * per + cluster.carrier_M).ravel()] = True
    for shift in range(1, cluster.nodes_per_datacenter):
        to = nodes_on(cluster, shift)
        seconds = _message_seconds(yard, to, carrier_R, size, repeat)
        for r in np.flatnonzero(np.isfinite(seconds)).tolist():
            rate = size / max(seconds[r] - cluster.scale_out.latency, 1e-9)
            for at in (cluster.nic(r), cluster.nic(int(to[r]))):
                best[at] = max(best[at], rate)
    rails = rail_factors(cluster, best) if cluster.nodes_per_datacenter > 1 else cluster.rails
    if cluster.wan is None or cluster.datacenters == 1:
        return cluster.but(rails=rails)
    seconds = _message_seconds(yard, datacenter_on(cluster), carrier_R, size, repeat)
    return cluster.but(rails=rails, wan=_wan_port(cluster, size, seconds))


def _wan_port(cluster: Cluster, size: int, seconds: Any) -> Port:
    """From what the messages took that left each datacenter together."""
    wan = cluster.wan
    assert wan is not None
    sent_D = np.isfinite(seconds).reshape(cluster.datacenters, -1).sum(axis=1)
    if not sent_D.all():
        return wan
    took_D = np.nanmax(seconds.reshape(cluster.datacenters, -1), axis=1) - wan.latency
    slowest = float((sent_D * size / np.maximum(took_D, 1e-9)).min()) * cluster.contention.factor(
        float(sent_D.max())
    )
    return wan if abs(slowest / wan.bandwidth - 1) < 0.1 else Port(slowest, wan.latency)


def rail_factors(cluster: Cluster, best: Any) -> Any:
    """[node, nic] from its best rate. A nic that lives is never called dead, however slow: plans would leave it out for good."""
    factor = np.minimum(best / cluster.scale_out.bandwidth, 1.0)
    factor[factor > 0.9] = 1.0
    return np.where(cluster.rails > 0, np.maximum(factor.round(3), 0.001), 0.0)


def _message_seconds(yard: Links, to: Any, carrier_R: Any, size: int, repeat: int) -> Any:
    """[rank]: the least seconds of its message on its own rail; nan where it sends none. Alike on every rank.

    The receiver says how long it took: a send is done when the last byte is in the kernel's buffer. The least, since
    what disturbs a measurement makes it longer.
    """
    cluster, me = yard.cluster, yard.rank
    alive = np.array([cluster.rails[cluster.nic(r)] > 0 for r in range(yard.size)])
    sends = carrier_R & alive & alive[to]
    source = int(np.flatnonzero(to == me)[0])
    out, into = torch.zeros((2, size), dtype=torch.uint8, device=yard.device)
    receives = [Bare(source, into)] if sends[source] else []
    posts = [Bare(int(to[me]), out)] if sends[me] else []
    took: list[float] = []

    def once() -> None:
        dist.barrier(group=yard.control.group)
        start = time.perf_counter()
        arriving, leaving = yard.transport.post(receives, posts)
        for work in arriving:
            work.wait()
        if arriving:
            if yard.device.type == "cuda":  # there a wait is the stream's, not ours
                torch.cuda.current_stream(yard.device).synchronize()
            took.append(time.perf_counter() - start)
        for work in leaving:
            work.wait()

    floor = yard.floor("measure").meet()
    for _ in range(repeat):
        _wait(yard)
        floor.watched(once)
    own = torch.full((yard.size,), -1.0, dtype=torch.float64)
    if took:
        own[source] = min(took)
    floor.all_reduce(own, dist.ReduceOp.MAX, group=yard.control.group)
    found = own.numpy()
    return np.where(found < 0, np.nan, found)


def _ring_seconds(yard: Links, target: Any, size: int, repeat: int) -> float:
    """One row of `size` bytes from every rank to its target."""
    rows = np.zeros((yard.size, yard.size), np.int64)
    rows[np.arange(yard.size), target] = 1
    plan = yard.plan(Traffic(rows, size))
    source = torch.zeros((1, size), dtype=torch.uint8, device=yard.device)
    output = torch.zeros((1, size), dtype=torch.uint8, device=yard.device)
    return _slowest(_median(lambda: yard.exchange(plan, False, output, source), yard, repeat), yard)


def _expert_seconds(layer: MoELayer, yard: Links, rows: int, repeat: int) -> float:
    """Forward of `rows` rows spread over the home experts; 0 on a rank that owns none."""
    experts = len(layer.own)
    if experts == 0:
        return 0.0
    counts = np.full(experts, rows // experts)
    counts[: rows % experts] += 1
    ends = to_device(np.cumsum(counts), layer.down.device, torch.int32)
    x = torch.randn(rows, layer.down.shape[1], dtype=layer.down.dtype, device=layer.down.device)

    def compute() -> None:
        stacks = layer.gate_up, layer.down
        grouped_experts(x, ends, *stacks, activation=layer.activation, counts=counts.tolist())

    with torch.no_grad():
        return _median(compute, yard, repeat)


def _step_seconds(
    layers: list[MoELayer], step: Callable[[], Any], yard: Links, repeat: int
) -> tuple[float, float]:
    """(median seconds of a step, of which in the MoE layers: three times their forward)."""
    inside = [0.0]
    began = [0.0]

    def enter(module: nn.Module, inputs: Any) -> None:
        _wait(yard)
        began[0] = time.perf_counter()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        _wait(yard)
        inside[0] += time.perf_counter() - began[0]

    hooks = [
        hook
        for layer in layers
        for hook in (layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave))
    ]
    try:
        total = _median(step, yard, repeat)
    finally:
        for hook in hooks:
            hook.remove()
    return total, 3 * inside[0] / (repeat + 1)


def _median(function: Callable[[], Any], yard: Links, repeat: int) -> float:
    function()
    seconds = []
    for _ in range(repeat):
        _wait(yard)
        start = time.perf_counter()
        function()
        _wait(yard)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _wait(yard: Links) -> None:
    if yard.device.type == "cuda":
        torch.cuda.synchronize(yard.device)


def _slowest(value: float, yard: Links) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    yard.floor("measure").meet().all_reduce(tensor, dist.ReduceOp.MAX, group=yard.control.group)
    return float(tensor)
