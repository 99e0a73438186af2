"""The run as its ranks see it: all modes side by side, then one folder with everything in it."""

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
from moeyard.train.journal import Journal, Stop, checkpoint_folder, machine
from moeyard.train.modes import CODED
from moeyard.train.options import Options
from moeyard.train.resume import load_done, save_done
from moeyard.units import show_bandwidth, show_seconds

Progress = Callable[[str, dict[str, Any]], None]
LEAVE = 60.0  # seconds that rank 0 waits for the others at the end


def run_rank(options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """The whole run on this rank, started by torchrun, a lab or anything that sets torchrun's environment."""
    from moeyard.runtime.transport.detect import lab_place
    from moeyard.train.device import open_world
    from moeyard.train.turns import Runner, run_side_by_side

    if "RANK" not in os.environ:
        raise MoeyardError("no RANK in the environment; start with torchrun, or in a lab with --lab")
    _open_files()
    place = lab_place()
    open_world(options, in_lab=place is not None)
    rank = dist.get_rank()
    done = _finished(options)
    modes = [mode for mode in options.modes if mode not in done]
    cluster, links = _links(options) if modes else (None, "")
    runners = []
    for mode in modes:
        trainer = _trainer(options, mode, place, cluster)
        journal = Journal(options, mode, rank, trainer.first, progress if rank == 0 else None)
        runners.append(Runner(trainer, journal))
    stopped = run_side_by_side(runners, options, Stop(options, rank))
    for one in runners:
        found = _finish_mode(one.trainer, one.journal, links)
        if rank == 0 and found is not None:
            done[one.journal.mode] = found
            if len(one.journal.steps) >= options.steps:
                save_done(options, one.journal.mode, found)
        one.trainer.close()
    ended = end(options, done, writes=rank == 0)
    _leave(rank)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return ended | {"stopped": stopped}


def end(options: Options, done: dict[str, Any], *, writes: bool = True) -> dict[str, Any]:
    """What a run leaves of the modes that are done, and what it returns."""
    if writes and done:
        _write_run(options, {mode: done[mode] for mode in options.modes if mode in done})
    return {"summary": {mode: one["summary"] for mode, one in done.items()}, "stopped": False}


def _open_files() -> None:
    """Every yard keeps a connection to every rank on every rail: with many modes more than a process may open by default."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _links(options: Options) -> tuple[Any, str]:
    """(the cluster to plan for in every mode, how its links are known)."""
    from moeyard.runtime import Yard

    if options.links != "measure":
        return None, "nominal"
    with Yard(cluster="measure", timeout=options.timeout) as yard:
        return yard.cluster, str(yard.links)


def _trainer(options: Options, mode: str, place: Any, cluster: Any) -> Any:
    from moeyard.train.loop import Trainer

    trainer = Trainer(options, mode, place, cluster)
    if options.resume:
        trainer.resume(checkpoint_folder(options, mode))
    return trainer


def _finish_mode(trainer: Any, journal: Journal, links: str) -> dict[str, Any] | None:
    """Pictures, prediction, summary and facts of a mode; None where it has made no step, and but on rank 0. Every rank calls this."""
    from moeyard.train.predict import predicted_steps

    if trainer.unsaved is not None or trainer.meter.log.flown:
        _save_pictures(trainer, journal.folder)
    late = trainer.meter.late(trainer.accelerator)
    found = None
    if dist.get_rank() == 0 and journal.steps:
        predicted = predicted_steps(trainer, journal.steps)
        summary = journal.summary() | {"late": late, "predicted": predicted}
        found = {"summary": summary, "facts": _facts(trainer.options, trainer, links)}
    journal.close()
    return found


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


def show_steps(options: Options) -> str:
    """Which of them the times are of."""
    more = "" if options.steps - options.warmup > 1 else "; give more --steps for times that last"
    if options.warmup == 0:
        return f"{options.steps}, all timed: the first, which loads and measures, too{more}"
    return f"{options.steps}, timed from step {options.warmup + 1} on{more}"


NETWORKS = {
    Network.SHAPED: "a lab on one machine: namespaces, shaped by tbf",
    Network.LOOPBACK: "UNSHAPED: all ranks on one machine's own network (namespaces refused, --network loopback, or torchrun on one machine; or ranks that share a GPU)",
    Network.CLUSTER: "a cluster's own",
}


def _facts(options: Options, trainer: Any, links: str) -> dict[str, Any]:
    from moeyard.runtime.transport.detect import lab_place
    from moeyard.train.device import describe_device
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
            "links": f"{links}: {_show_links(cluster)}",
            "modes": f"side by side, {options.turn} steps in turn",
            "steps": show_steps(options),
            "network": f"{rates if lab_place() is not None else f'plans and bounds assume {rates}'}; {NETWORKS[trainer.network]}",
            "contention law": "ideal" if law.loss == 0 else f"loss {law.loss:g} per flow beyond {law.knee:g}, at most {law.ceiling:g} x",
            "accelerator": emulated,
            "machine": machine(),
            "device": describe_device(trainer.yard.device, options),
            "model": describe(trainer.model.config, options.dtype),
            "text": trainer.text.name,
            "batch": f"{options.batch} sequences of {options.length} bytes per rank",
            "routing": f"skew of the trace {options.skew}" if options.skew else "as the routers choose",
            "planner, scheduler": f"{options.planner} with {options.slots} slots a rank, {options.scheduler}",
            **({"codec": options.codec} if set(options.modes) & set(CODED) else {}),
            "memory": _memory(options, trainer),
            "dense gradients": "all-reduced over the ranks' own rails, in every mode",
        },
    }  # fmt: skip


def _memory(options: Options, trainer: Any) -> str:
    """What the yard takes on a rank, at most; of the mode trained last."""
    import torch

    config, dtype = trainer.model.config, getattr(torch, options.dtype)
    return str(
        trainer.yard.memory(
            trainer.model, options.tokens, config.num_experts_per_tok, config.hidden_size, dtype
        )
    )


def _show_links(cluster: Any) -> str:
    ports = [("scale-up", cluster.scale_up), ("scale-out", cluster.scale_out)]
    if cluster.wan is not None:
        ports.append(("wan", cluster.wan))
    told = [f"{name} {show_bandwidth(port.bandwidth)}, {show_seconds(port.latency)}" for name, port in ports]
    slow = int(((cluster.rails > 0) & (cluster.rails < 1)).sum())
    return "; ".join([*told, *([f"{slow} slow nics"] if slow else [])])


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
        "title": f"A small {options.family}, trained {f'{len(summary)} ways' if len(summary) > 1 else 'with ' + ', '.join(summary)}",
        "moeyard": __version__, "conditions": conditions, "cluster": facts["cluster"], "network": facts["network"],
        "emulated": options.compute is not None, "dtype": options.dtype, "modes": list(summary), "warmup": options.warmup, "summary": summary,
    }  # fmt: skip
    (Path(options.out) / "run.json").write_text(json.dumps(data, indent=1))
