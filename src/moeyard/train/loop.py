"""The training loop. What a user of moeyard writes is `train_step`, `go_on_without` and the few lines of `Trainer.step`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

import moeyard.runtime as yr
from moeyard.cluster import Cluster
from moeyard.runtime.observe.network import network_of
from moeyard.runtime.observe.refine import Refiner
from moeyard.train.accelerator import Accelerator
from moeyard.train.demands import Demands
from moeyard.train.device import precision
from moeyard.train.meter import Meter, StepLog
from moeyard.train.model import emulated_spec, make_config, make_model, model_spec
from moeyard.train.options import Options
from moeyard.train.skew import Skew
from moeyard.train.text import Text
from moeyard.units import show_bandwidth

if TYPE_CHECKING:
    from moeyard.train.journal import Journal


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    yard: yr.Yard,
    clip: float,
    autocast: AbstractContextManager[Any],
) -> float:
    """One step on this rank's tokens[sequence, length + 1]; this rank's share of the whole batch's loss."""
    with autocast:
        logits = model(input_ids=tokens[:, :-1]).logits
    labels = tokens[:, 1:]
    loss_sum = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    loss = yr.global_mean(loss_sum, labels.numel(), yard)
    loss.backward()  # type: ignore[no-untyped-call]
    yr.sync_gradients(model, yard)
    yr.clip_grad_norm_(model, clip, yard)
    yard.settle()  # a lost rail shows here at the latest, while the step can still be repeated
    optimizer.step()
    return float(loss.detach())


def _accelerator(options: Options, config: Any, cluster: Cluster | None) -> Accelerator | None:
    """An emulated one, as fast as this rank's in the cluster (outside a lab: as every other)."""
    spec = emulated_spec(config, options)
    speed = 1.0 if cluster is None else float(cluster.speed[dist.get_rank()])
    return None if spec is None else Accelerator(spec, speed)


class Trainer:
    """One mode: a yard, a model on it, and the state of its training."""

    def __init__(self, options: Options, mode: str, place: Any, cluster: Cluster | None = None) -> None:
        """cluster: to plan for; None: as the lab or the launcher shows it."""
        self.options, self.mode = options, mode
        config = make_config(options)
        cluster = cluster or (None if place is None else place.cluster)
        spec = None if cluster is None else model_spec(config, options, cluster)
        wanted = dict(options.yard(mode))
        if mode == "plain" and place is not None:  # the backend's own all-to-all, each rank on its own rail
            wanted |= {"interfaces": (), "management": place.management if place.shaped else None}
        self.accelerator = _accelerator(options, config, cluster)
        log = StepLog()
        self.yard = yr.Yard(
            model=spec, timeout=options.timeout, watcher=log, accelerator=self.accelerator, cluster=cluster,
            **wanted,
        )  # fmt: skip
        self.model = yr.parallelize(make_model(config, options.seed).to(self.yard.device), self.yard)
        self.spec = spec or model_spec(config, options, self.yard.cluster)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate)
        self.text = Text(options.text, options.seed)
        self.skew = Skew(self.model, options.skew, dist.get_rank(), options.seed) if options.skew else None
        self.demands = Demands(self.model)
        if self.accelerator is not None:
            self.accelerator.attach(self.model)
        self.network = network_of(self.yard)
        emulated = self.accelerator is not None
        self.meter = Meter(
            self.yard, log, self.spec.row_bytes, self.network, expert_bytes=self.spec.expert_bytes, emulated=emulated
        )  # fmt: skip
        self.refiner = Refiner()
        self.first = 0
        self.unsaved: int | None = None  # the last step made, while no checkpoint holds it

    def resume(self, folder: str) -> None:
        """Go on from the newest checkpoint there, if any."""
        if yr.latest(folder) is not None:
            self.first = yr.load_checkpoint(folder, self.model, self.optimizer, self.yard).step + 1

    def save(self, folder: str, step: int) -> None:
        yr.save_checkpoint(folder, self.model, self.optimizer, self.yard, step=step)
        self.unsaved = None

    def save_last(self, folder: str) -> None:
        """What was done, unless a checkpoint holds it already."""
        if self.unsaved is not None:
            self.save(folder, self.unsaved)

    def step(self, step: int, record: Journal, stop: bool = False) -> bool:
        """One step, measured and written down; true if any rank asked to stop."""
        tokens = self.text.batch(step, dist.get_rank(), self.options.batch, self.options.length)
        self.meter.begin()
        while True:
            try:
                self.demands.begin(step)
                share = self._step(step, tokens)
                break
            except (yr.RailLost, RuntimeError) as error:
                record.event(step, *self.go_on_without(error))
        metrics = self.meter.end(share, tokens.shape[0] * self.options.length, stop)
        asked = bool(metrics.pop("stop"))
        record.step(step, metrics)
        self.unsaved = step
        last = step + 1 == self.options.steps
        every = self.options.checkpoint_every
        if every and (last or (step + 1) % every == 0):
            self.save(record.checkpoints, step)
        self._refine(step, record)
        again = self.options.remeasure_every
        if again and (step + 1) % again == 0 and not last and not asked and self.mode != "plain":
            record.event(step, *self.remeasure())
        return asked

    def _step(self, step: int, tokens: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        if self.skew is not None:
            self.skew.step = step
        if self.accelerator is not None:
            self.accelerator.begin()
        device = self.yard.device
        autocast = precision(device, self.options)
        return train_step(
            self.model, self.optimizer, tokens.to(device), self.yard, self.options.clip, autocast
        )

    def go_on_without(self, error: BaseException) -> tuple[str, str]:
        """After a lost rail: agree on the dead nics, plan around them; the caller repeats the step. (event, detail)."""
        began = self.meter.since_begin()
        dead = self.yard.recover(error)
        self.meter.forget()
        names = ", ".join(f"node {node} rail {rail}" for node, rail in dead)
        return (
            "rail lost",
            f"{names}; noticed {began:.1f} s into the step, planned anew after {self.meter.since_begin():.1f} s; step repeated",
        )

    def remeasure(self) -> tuple[str, str]:
        """Measure rails and wan and plan for what they give now. (event, detail)."""
        return "links measured", self._plan_for(yr.remeasure(self.yard)) or "as planned for"

    def _refine(self, step: int, record: Journal) -> None:
        """Plan for rails as the step's own exchanges show them, if asked to."""
        if not self.options.refine:
            return
        offset = float(self.meter.offsets[self.yard.rank])
        found = self.refiner.step(self.yard, self.meter.all_exchanges(), offset)
        if found is not None:
            record.event(step, "links refined", self._plan_for(found))

    def _plan_for(self, found: Cluster) -> str:
        """From now on; what is new."""
        before = self.yard.cluster.rails
        changed = [
            f"node {node} rail {rail} at {found.rails[node, rail]:.2f}"
            for node, rail in zip(*np.nonzero(found.rails != before), strict=True)
        ]
        old, new = self.yard.cluster.wan, found.wan
        if old is not None and new is not None and old != new:
            rates = [show_bandwidth(port.bandwidth) for port in (old, new)]
            changed.append(f"wan {rates[0]} -> {rates[1]}")
        if changed:
            self.yard.set_cluster(found)
        return "; ".join(changed)

    def close(self) -> None:
        self.yard.close()
