"""The run as its ranks see it: every mode in turn, then one folder with everything in it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from moeyard.errors import MoeyardError
from moeyard.formats.clusters import cluster_data
from moeyard.train.journal import Journal, checkpoint_folder, machine
from moeyard.train.options import Options

Progress = Callable[[str, dict[str, Any]], None]
LEAVE = 60.0  # seconds that rank 0 waits for the others at the end


def run_rank(options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """The whole run on this rank, started by torchrun, a lab or anything that sets torchrun's environment."""
    from moeyard.runtime.transport.detect import lab_place
    from moeyard.train.loop import Trainer

    if "RANK" not in os.environ:
        raise MoeyardError("no RANK in the environment; start with torchrun, or in a lab with --lab")
    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), lab_place()
    summary: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for mode in options.modes:
        trainer = Trainer(options, mode, place)
        if options.resume:
            trainer.resume(checkpoint_folder(options, mode))
        record = Journal(options, mode, rank, trainer.first, progress if rank == 0 else None)
        trainer.run(record)
        if record.steps:
            summary[mode] = record.summary()
            _save_pictures(trainer, record.folder)
        facts = _facts(options, trainer, place)
        stopped = record.stopped
        record.close()
        trainer.close()
        if stopped:
            break
    if rank == 0:
        _write_run(options, summary, facts)
    _leave(rank)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return {"summary": summary, "stopped": stopped}


def _leave(rank: int) -> None:
    """Rank 0 holds the store, so it goes last. The ranks meet by way of the store: a rail of the default group may be dead."""
    store = PrefixStore("end", dist.distributed_c10d._get_default_store())
    store.set(str(rank), "done")
    if rank == 0:
        store.wait([str(r) for r in range(dist.get_world_size())], timedelta(seconds=LEAVE))


def _save_pictures(trainer: Any, folder: Path) -> None:
    """One exchange of the last step, measured, and the same plan simulated."""
    from moeyard.sim.flow import simulate

    found = trainer.meter.timeline()
    if found is not None:
        measured, schedule = found
        measured.save(folder / "measured.npz")
        simulate(trainer.yard.cluster, schedule).save(folder / "planned.npz")
    spans = trainer.meter.step_spans(trainer.accelerator)
    if dist.get_rank() == 0:
        (folder / "spans.json").write_text(json.dumps(spans))


def _facts(options: Options, trainer: Any, place: Any) -> dict[str, Any]:
    from moeyard.train.model import describe

    cluster = trainer.yard.cluster
    shaped = place is None or place.shaped
    rate = cluster.scale_out.bandwidth * 8 / 1e6
    rates = f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {cluster.nics_per_node} rails of {rate:.3g} Mbit/s payload"
    accelerator = trainer.accelerator
    emulated = "none: computed as fast as this machine does"
    if accelerator is not None:
        late = accelerator.late / max(1, accelerator.waits)
        emulated = (
            f"emulated, {options.compute:g} rows/s an expert row; the rest of a layer {1e3 * accelerator.dense_forward:.0f} ms forward, "
            f"{1e3 * accelerator.dense_backward:.0f} ms backward; real maths took longer in {late:.0%} of the waits (rank 0)"
        )
    law = cluster.contention
    return {
        "cluster": cluster_data(cluster),
        "shaped": shaped,
        "conditions": {
            "network": f"{rates}; {'a lab on one machine: namespaces, shaped by tbf' if place and shaped else 'a real cluster' if place is None else 'UNSHAPED: all ranks on loopback (namespaces refused, or --network loopback)'}",
            "contention law": "ideal" if law.loss == 0 else f"loss {law.loss:g} per flow beyond {law.knee:g}, at most {law.ceiling:g} x",
            "accelerator": emulated,
            "machine": machine(),
            "model": describe(trainer.model.config),
            "text": trainer.text.name,
            "batch": f"{options.batch} sequences of {options.length} bytes per rank",
            "routing": f"skew of the trace {options.skew}" if options.skew else "as the routers choose",
            "planner, scheduler": f"{options.planner} with {options.slots} slots a rank, {options.scheduler}",
            "dense gradients": "all-reduced over the ranks' own rails, in every mode",
        },
    }  # fmt: skip


def _write_run(options: Options, summary: dict[str, Any], facts: dict[str, Any]) -> None:
    from moeyard.version import __version__

    data = {
        "title": f"A small {options.family}, trained {'both ways' if len(summary) > 1 else 'with ' + ', '.join(summary)}",
        "moeyard": __version__, "conditions": facts["conditions"], "cluster": facts["cluster"], "shaped": facts["shaped"],
        "emulated": options.compute is not None, "modes": list(summary), "summary": summary,
    }  # fmt: skip
    (Path(options.out) / "run.json").write_text(json.dumps(data, indent=1))
