"""What is fuzzed: valid files to begin with, and how each kind is read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

import moeyard as my
from bench import samples
from moeyard.fold import fold
from moeyard.formats import arrays, clusters, models, placements, schedules, steps, timelines
from moeyard.formats.replays import load_replay, save_replay
from moeyard.formats.traces import find_trace
from moeyard.replay.result import FIGURES, Replay, Way
from moeyard.report.load import load_run
from moeyard.report.write import page_of_run

STORED = Path(__file__).resolve().parent.parent.parent / "tests" / "core" / "written_by_0_1"


@dataclass(frozen=True)
class Reader:
    name: str
    make: Callable[[Path], list[Path]]  # valid files, or folders
    read: Callable[[Path], Any]
    ready: Callable[[], AbstractContextManager[Any]] = nullcontext
    again: Callable[[Path, Random], None] | None = (
        None  # after the mutation: checksums made anew, now and then
    )


def stored(*names: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        for name in names:
            shutil.copy(STORED / name, folder / name)
        return [folder / name for name in names]

    return make


def make_clusters(folder: Path) -> list[Path]:
    port = my.Port(1e9, 1e-6)
    rails = np.ones((4, 2))
    rails[1, 1] = 0.5
    rich = my.Cluster(4, 2, port, my.Port(1e8, 1e-5), datacenters=2, wan=my.Port(1e7, 1e-3), rails=rails,
                      speed=np.linspace(0.5, 1, 8), contention=my.Contention(0.1, 2.0, 3.0), name="rich")  # fmt: skip
    my.save_cluster(rich, folder / "rich.toml", "a description")
    return [*stored("cluster.toml")(folder), folder / "rich.toml"]


def make_matrices(folder: Path) -> list[Path]:
    rows = np.random.default_rng(0).integers(0, 99, (4, 4))
    traffic = my.Traffic(rows, 16)
    for suffix in ("npy", "npz", "csv"):
        my.save_traffic(traffic, folder / f"t.{suffix}")
    return [folder / f"t.{suffix}" for suffix in ("npy", "npz", "csv")]


def make_traces(folder: Path) -> list[Path]:
    counts = np.random.default_rng(0).integers(0, 9, (3, 2, 4, 8))
    my.save_trace(my.Trace(counts, [1, 2, 5], {"model": "x", "list": [1, {"a": None}]}), folder / "t.npz")
    return [folder / "t.npz", *stored("trace.npz")(folder)]


def make_steps(folder: Path) -> list[Path]:
    cluster = my.Cluster(2, 2, my.Port(1e9, 1e-6), my.Port(1e9, 1e-6))
    hosts = [[True, True, True, True], [False, True, False, True]]
    my.plan_step(cluster, [my.Placement([0, 1], hosts)] * 2, ahead=2).save(folder / "step.json")
    return [folder / "step.json"]


def make_recorded(folder: Path) -> list[Path]:
    found = [folder / path.name for path in sorted(samples.FOLDER.iterdir())]
    for path in found:
        shutil.copy(samples.FOLDER / path.name, path)
    return found


def read_recorded(path: Path) -> None:
    fold(find_trace(str(path)), 3).demand(0, 0)


def make_replays(folder: Path) -> list[Path]:
    figures = {name: np.linspace(1, 2, 3) for name in FIGURES}
    found = Replay(
        {"network": "estimate"}, {"trace": "x"}, (0, 1, 5), np.ones(3), np.array([np.nan, 0.1, 0.2]),
        (Way("static", "direct", figures), Way("auto", "auto", figures)), {"static": np.ones((3, 4))},
    )  # fmt: skip
    save_replay(found, folder)
    return [folder / "replay.json"]


def make_timelines(folder: Path) -> list[Path]:
    (old,) = stored("timeline.npz")(folder)
    timelines.save_timeline(timelines.load_timeline(old), folder / "new.npz")
    return [old, folder / "new.npz"]


def make_models(folder: Path) -> list[Path]:
    found = []
    for name, config in models.MODELS.items():
        found.append(folder / f"{name}.json")
        found[-1].write_text(json.dumps(config))
    return found


def read_model(path: Path) -> None:
    models.load_model(path, tokens_per_rank=4096)


def read_trace(path: Path) -> None:
    trace = arrays.load_trace(path)
    trace.demand(0, 0)


def read_timeline(path: Path) -> None:
    timeline = timelines.load_timeline(path)
    assert timeline.makespan >= 0, timeline.makespan


def make_runs(folder: Path) -> list[Path]:
    (timeline,) = stored("timeline.npz")(folder)
    run = folder / "run"
    measured = {"source": "measured", "network": "shaped", "emulated": False}
    step = {"loss": 2.0, "tokens_per_s": 9.0, "overload": 1.1, "balancedness": 0.9, "plan_s": 0.02, "exchange_s": 0.2, "gather_s": 0.1, "wait_s": 0.1,
            "x_bound": 1.1}  # fmt: skip
    summary = {"iteration_s": 1.0, **step, "rows_per_rail": {"out": [[1, 2], [3, 4]], "in": [[4, 3], [2, 1]]},
               "parts_s": {"exchange": 0.2, "wait": 0.1, "plan": 0.02, "compute": 0.5}}  # fmt: skip
    summary["provenance"] = dict.fromkeys(
        ("iteration_s", "parts_s", "spans", "events", "rows_per_rail", *step), measured
    )
    data = {"title": "t", "conditions": {"machine": "2 cores"}, "emulated": True, "network": "shaped", "modes": ["plain"],
            "summary": {"plain": summary}}  # fmt: skip
    (run / "plain").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(data))
    lines = [{"step": i, "seconds": 1.0, **step} for i in range(3)] + [{"step": 1, "event": "rail 1 slowed"}]
    (run / "plain" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (run / "plain" / "spans.json").write_text(json.dumps([[["dense", 0.0, 0.1], ["exchange", 0.1, 0.2]]] * 2))
    for name in ("planned", "measured"):
        timelines.save_timeline(timelines.load_timeline(timeline), run / "plain" / f"{name}.npz")
    return [run]


MEASURED = {"source": "measured", "network": "shaped", "emulated": False}
ASKED = {"lab": "lab-2x2", "network": "auto"}


def make_metrics(folder: Path) -> list[Path]:
    """Steps and an event, as a run that is gone on with left them."""
    rails = {"out": [[1, 2], [3, 4]], "in": [[4, 3], [2, 1]]}
    step = {"loss": 2.0, "seconds": 1.0, "tokens_per_s": 9.0, "overload": 1.1, "balancedness": 0.9, "plan_s": 0.02, "exchange_s": 0.2,
            "gather_s": 0.1, "wait_s": 0.1, "x_bound": 1.1, "rows_per_rail": rails, "parts_s": {"exchange": 0.2, "compute": 0.8},
            "provenance": {"loss": MEASURED, "seconds": MEASURED}}  # fmt: skip
    lines = [{"step": i, **step} for i in range(4)]
    lines.insert(2, {"event": "rail lost", "step": 2, "detail": "node 0 rail 1"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return [folder / "metrics.jsonl"]


def read_metrics(path: Path) -> None:
    from moeyard.train import journal

    _, steps = journal.read_metrics(path, 3)
    if steps:
        json.dumps(journal.summarise(path, steps, 1))


def make_resumed(folder: Path) -> list[Path]:
    from moeyard.train import resume
    from moeyard.train.options import Options

    options = Options(str(folder / "run"), modes=("plain",), config={"hidden_size": 64})
    (folder / "run" / "plain").mkdir(parents=True)
    resume.begin(options, ASKED)
    (line, *_) = make_metrics(folder)[0].read_text().splitlines()
    facts = {
        "cluster": {"nodes": 2},
        "network": "shaped",
        "conditions": {"accelerator": "none", "machine": "2 cores"},
    }
    late = {"mean": 0.1, "worst": 0.2, "worst_rank": 1}
    resume.save_done(options, "plain", {"summary": json.loads(line) | {"late": late}, "facts": facts})
    return [folder / "run"]


def read_resumed(path: Path) -> None:
    """As `moeyard train --resume` does where nothing is left to train."""
    from moeyard.train import job, resume
    from moeyard.train.options import Options

    options = Options(str(path), modes=("plain",), config={"hidden_size": 64}, resume=True)
    resume.begin(options, ASKED)
    done = resume.load_done(options)
    if done:
        job._write_run(options, done)
        (path / "run.json").unlink()


# checkpoints: one rank, a plain model


@contextmanager
def one_rank() -> Iterator[None]:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def company():
    import torch.distributed as dist

    from moeyard.runtime.agree.floor import Floor
    from moeyard.runtime.transport.buffers import Workspace

    return SimpleNamespace(
        dense_control=dist.group.WORLD,
        floor=lambda call, behind=False: Floor(call, dist.group.WORLD),
        size=1,
        workspace=Workspace(),
    )


def trained():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def make_checkpoints(folder: Path) -> list[Path]:
    import moeyard.runtime as yr

    extra = {"seen": {"a": [1, (2, 3)], "n": float("nan"), "array": np.arange(4)}}
    yr.save_checkpoint(folder / "run", *trained(), company(), step=1, extra=extra)
    return [folder / "run"]


def read_checkpoint(path: Path) -> None:
    import moeyard.runtime as yr

    yr.load_checkpoint(path, *trained(), company(), extra={"seen": None})


def seal_anew(path: Path, chance: Random) -> None:
    """Half of the time the checksums are made to fit: then it is malice, not damage."""
    from moeyard.runtime.state import folders

    if chance.random() < 0.5:
        return
    for about in path.rglob(folders.ABOUT):
        try:
            content = json.loads(about.read_bytes())
            content["index"]["sha256"] = folders._sha256((about.parent / "index.json").read_bytes())
            content.pop("sha256", None)
            about.write_text(json.dumps(content | {"sha256": folders._seal(content)}))
        except (ValueError, TypeError, KeyError, OSError, AttributeError, RecursionError):
            return


# Hugging Face folders: a small model


@contextmanager
def a_yard() -> Iterator[None]:
    import moeyard.runtime as yr

    port = my.Port(1e9, 1e-6)
    with one_rank(), yr.Yard(cluster=my.Cluster(1, 1, port, port), scheduler="direct", timeout=60) as yard:
        _yards.append(yard)
        yield
        _yards.clear()


_yards: list[Any] = []


def make_folders(folder: Path) -> list[Path]:
    import transformers

    config = transformers.MixtralConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(folder / "hf")
    transformers.MixtralForCausalLM(config).save_pretrained(folder / "sharded", max_shard_size="2KB")
    return [folder / "hf", folder / "sharded"]


def read_folder(path: Path) -> None:
    import moeyard.runtime as yr

    yr.from_pretrained(path, _yards[0])


READERS = {
    one.name: one
    for one in (
        Reader("clusters", make_clusters, clusters.load_cluster),
        Reader("traffic", make_matrices, arrays.load_traffic),
        Reader("demand", make_matrices, arrays.load_demand),
        Reader("traces", make_traces, read_trace),
        Reader("recorded", make_recorded, read_recorded),
        Reader("replays", make_replays, load_replay),
        Reader("placements", stored("placement.json"), placements.load_placement),
        Reader("steps", make_steps, steps.load_step),
        Reader("schedules", stored("schedule.json"), schedules.load_schedule),
        Reader("timelines", make_timelines, read_timeline),
        Reader("models", make_models, read_model),
        Reader("runs", make_runs, load_run),
        Reader("pages", make_runs, page_of_run),
        Reader("metrics", make_metrics, read_metrics),
        Reader("resumed", make_resumed, read_resumed),
        Reader("checkpoints", make_checkpoints, read_checkpoint, one_rank, seal_anew),
        Reader("folders", make_folders, read_folder, a_yard),
    )
}
