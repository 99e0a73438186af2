"""What the simulator says a step takes, beside what it took: the same demands, placed, assigned and scheduled as the mode does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moeyard.assign import assign
from moeyard.model import top_k
from moeyard.runtime import expert_modules
from moeyard.runtime.agree.ahead import RECORDS
from moeyard.runtime.layers.ahead import choose_placement
from moeyard.sim.step import simulate_step
from moeyard.train.options import Options

MOST = 4  # steps of a mode: each takes a few tenths of a second


def predicted_steps(trainer: Any, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """{step: seconds by the simulator} of the last steps made, `hideable` of their gathers and reduces; None for what it knows
    nothing of: torch's own all-to-all, and accelerators that are not emulated, whose rate nobody told it."""
    options: Options = trainer.options
    if trainer.accelerator is None or trainer.yard.options.transport == "collective":
        return None
    plans = {int(one["step"]): float(one["plan_s"]) for one in steps}
    seconds, shares = {}, []
    known = sorted(set(plans) & set(trainer.demands.steps))
    for step in ([one for one in known if one >= options.warmup] or known)[-MOST:]:
        found, serial, work = _predict(trainer, step, plans[step])
        seconds[step] = found
        if work > 0:
            # Beyond all of it: in the foreground they held up other parts' rows, too.
            shares.append(min(1.0, (serial - found) / work))
    if not seconds:
        return None
    return {"seconds": seconds, "hideable": sum(shares) / len(shares) if shares else None}


def _predict(trainer: Any, step: int, planning: float) -> tuple[float, float, float]:
    """(seconds of the step, all in the foreground, of its gathers and reduces)."""
    cluster, options = trainer.yard.cluster, trainer.yard.options
    spec = options.costed or trainer.spec
    said = trainer.demands.steps
    hosts, jobs, choices = [], [], top_k(trainer.model.config)
    for layer, (_, module) in enumerate(expert_modules(trainer.model)):
        past = [said[one][layer] for one in range(step - RECORDS, step) if one in said]
        known = past if options.plans_ahead and past else said[step][layer]
        share: Any = module.expert_share
        hosts.append(choose_placement(cluster, options, known, share.home_E, choices))
        jobs.append(assign(cluster, said[step][layer], hosts[-1], options.policy, model=spec))
    how: dict[str, Any] = {
        "scheduler": options.scheduler,
        "planning": planning / len(jobs),
        "plan_ahead": False,
        "dedup": options.dedup,
        "top_k": choices,
    }
    timeline = simulate_step(
        cluster, spec, hosts, jobs, overlap=options.overlaps, chunks=options.chunks, **how
    )
    rest = dense_seconds(trainer)
    if not options.overlaps:
        return timeline.makespan + rest, timeline.makespan + rest, 0.0
    serial = simulate_step(cluster, spec, hosts, jobs, overlap=False, chunks=options.chunks, **how)
    work = serial.seconds("gather") + serial.seconds("reduce")
    return timeline.makespan + rest, serial.makespan + rest, work


def dense_seconds(trainer: Any) -> float:
    """What a step does beside its layers, which the step's model leaves out: the all-reduce of dense gradients round a ring of all ranks,
    where each nic and each wan port carries them nearly twice; and words between datacenters, which are late."""
    cluster, layers = trainer.yard.cluster, list(expert_modules(trainer.model))
    own = {id(p) for _, module in layers for p in module.parameters(recurse=False)}
    size = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if id(p) not in own)
    ranks = cluster.num_ranks
    rate = cluster.scale_out.bandwidth if cluster.nodes > 1 else cluster.scale_up.bandwidth
    far = 0.0
    if cluster.wan is not None and cluster.datacenters > 1:
        rate = min(rate, cluster.wan.bandwidth)
        far = cluster.wan.latency * far_words(ranks, cluster.datacenters, len(layers))
    return float(2 * size * (ranks - 1) / ranks / rate + far)


MEETINGS = 4  # of a step: before the loss, the sum of gradients, the norm, the optimizer
SUMS = 4  # labels, which gradients there are, dense gradients, the norm


def far_words(ranks: int, datacenters: int, layers: int) -> int:
    """Latencies of the wan that a step waits for one after another: one a meeting, one for the counts of a layer, and those of a sum, where
    each part goes twice round a ring and crosses to the next datacenter after every so many ranks."""
    crossings = math.ceil(2 * (ranks - 1) / (ranks // datacenters))
    return MEETINGS + layers + SUMS * crossings
