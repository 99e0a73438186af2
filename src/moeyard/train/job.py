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
from moeyard.provenance import Network
from moeyard.train.journal import Journal, checkpoint_folder, machine
from moeyard.train.options import Options
from moeyard.train.resume import load_done, save_done

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
    done = _finished(options)
    stopped = False
    for mode in options.modes:
        if mode in done:
            continue
        trainer = Trainer(options, mode, place)
        if options.resume:
            trainer.resume(checkpoint_folder(options, mode))
        record = Journal(options, mode, rank, trainer.first, progress if rank == 0 else None)
        trainer.run(record)
        if trainer.first < options.steps:
            _save_pictures(trainer, record.folder)
        late = trainer.meter.late(trainer.accelerator)
        stopped = record.stopped
        if rank == 0 and record.steps:
            done[mode] = {"summary": record.summary() | {"late": late}, "facts": _facts(options, trainer)}
            if not stopped:
                save_done(options, mode, done[mode])
        record.close()
        trainer.close()
        if stopped:
            break
    if rank == 0 and done:
        _write_run(options, {mode: done[mode] for mode in options.modes if mode in done})
    _leave(rank)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return {"summary": {mode: one["summary"] for mode, one in done.items()}, "stopped": stopped}


def _finished(options: Options) -> dict[str, Any]:
    """Modes that a resumed run need not train again, as rank 0 finds them; all ranks skip the same."""
    found: list[Any] = [load_done(options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return dict(found[0])


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


NETWORKS = {
    Network.SHAPED: "a lab on one machine: namespaces, shaped by tbf",
    Network.LOOPBACK: "UNSHAPED: all ranks on one machine's own network (namespaces refused, --network loopback, or torchrun on one machine)",
    Network.CLUSTER: "a cluster's own",
}


def _facts(options: Options, trainer: Any) -> dict[str, Any]:
    from moeyard.runtime.transport.detect import lab_place
    from moeyard.train.model import describe

    cluster = trainer.yard.cluster
    rate = cluster.scale_out.bandwidth * 8 / 1e6
    rates = f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {cluster.nics_per_node} rails of {rate:.3g} Mbit/s payload"
    accelerator = trainer.accelerator
    emulated = "none: computed as fast as this machine does"
    if accelerator is not None:
        emulated = (
            f"emulated, {options.compute:g} rows/s an expert row; the rest of a layer {1e3 * accelerator.dense_forward:.0f} ms forward, "
            f"{1e3 * accelerator.dense_backward:.0f} ms backward"
        )
    law = cluster.contention
    return {
        "cluster": cluster_data(cluster),
        "network": trainer.network.value,
        "conditions": {
            "network": f"{rates if lab_place() is not None else f'plans and bounds assume {rates}'}; {NETWORKS[trainer.network]}",
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


def late_maths(late: dict[str, Any]) -> str:
    """Mode -> what `Meter.late` found, in words: of which rank, in which mode."""
    told = [
        f"{mode} {one['mean']:.0%} of the waits (worst rank {one['worst_rank']}: {one['worst']:.0%})"
        for mode, one in late.items()
        if one is not None
    ]
    return "; real maths took longer than the emulated in: " + ", ".join(told) if told else ""


def _write_run(options: Options, done: dict[str, Any]) -> None:
    """run.json, from what each mode left; the conditions are those of the mode trained last."""
    from moeyard.version import __version__

    summary = {mode: one["summary"] for mode, one in done.items()}
    facts = list(done.values())[-1]["facts"]
    conditions = dict(facts["conditions"])
    conditions["accelerator"] += late_maths({mode: one["late"] for mode, one in summary.items()})
    data = {
        "title": f"A small {options.family}, trained {'both ways' if len(summary) > 1 else 'with ' + ', '.join(summary)}",
        "moeyard": __version__, "conditions": conditions, "cluster": facts["cluster"], "network": facts["network"],
        "emulated": options.compute is not None, "modes": list(summary), "summary": summary,
    }  # fmt: skip
    (Path(options.out) / "run.json").write_text(json.dumps(data, indent=1))
