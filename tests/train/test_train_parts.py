"""The parts of a training run, each alone."""

import math
import os
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import moeyard as my
from moeyard.cli.train import in_lab
from moeyard.errors import InvalidDemand, InvalidFile, MoeyardError, UnknownName
from moeyard.provenance import Network, Provenance, Source
from moeyard.runtime.agree.watcher import Mark, Queued
from moeyard.runtime.observe.network import label
from moeyard.train.accelerator import Accelerator
from moeyard.train.device import SHARED, open_world
from moeyard.train.job import late_maths, show_steps
from moeyard.train.journal import read_metrics, summarise
from moeyard.train.meter import Flown, StepLog, measured_timeline, origins
from moeyard.train.options import Options
from moeyard.train.parts import PARTS, divide, exchange_spans
from moeyard.train.prepare import check
from moeyard.train.resume import begin, load_done, save_done
from moeyard.train.skew import draw, shares
from moeyard.train.text import Text


def test_drawn_experts_follow_the_trace_and_are_distinct():
    share_E = shares(my.load_trace("mixtral-8"), 3, 16)
    index = draw(share_E, 40_000, 2, np.random.default_rng(0)).numpy()
    assert (index[:, 0] != index[:, 1]).all()
    found = np.bincount(index.ravel(), minlength=16) / index.size
    assert np.abs(found - share_E).max() < 0.005


def test_the_share_of_an_expert_is_split_evenly():
    trace = my.load_trace("mixtral-8")
    rows = trace.demand(-1, 0).rows.sum(axis=0)
    assert np.allclose(shares(trace, 0, 16).reshape(8, 2).sum(axis=1), rows / rows.sum())
    with pytest.raises(InvalidDemand, match="multiple"):
        shares(trace, 0, 12)


def test_an_expert_with_more_than_a_row_per_token_is_refused():
    with pytest.raises(InvalidDemand, match="milder"):
        draw(np.array([0.7, 0.1, 0.2]), 10, 2, np.random.default_rng(0))


def test_text_is_the_same_for_the_same_step_and_rank():
    text = Text(None)
    one, again, other = (text.batch(*key, 2, 16) for key in ((3, 1), (3, 1), (3, 2)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == (2, 17)


def test_text_of_a_path(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 50)
    assert set(Text(str(tmp_path)).batch(0, 0, 1, 8).flatten().tolist()) == {97, 98}
    with pytest.raises(InvalidFile, match="no such"):
        Text(str(tmp_path / "none"))


def test_an_emulated_accelerator_takes_its_time_both_ways():
    model = my.ModelSpec(row_bytes=8, expert_bytes=8, expert_flops=1.0, flops=1000.0)  # 1 ms a row
    accelerator = Accelerator(model)
    x = torch.ones(40, 2, requires_grad=True)
    began = time.monotonic()
    y = accelerator.finish(accelerator.start(x, 40) * 2, 40)
    forward = time.monotonic() - began
    y.sum().backward()
    assert forward >= 0.040
    assert time.monotonic() - began - forward >= 0.080
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert accelerator.waits == 2


class Moe(torch.nn.Module):
    """Takes no time; says when its gradients pass."""

    expert_share = "some"

    def __init__(self, passed):
        super().__init__()
        self.passed = passed

    def forward(self, x):
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda _: self.passed.append(time.monotonic()))
        return y


def test_what_lies_before_a_layer_comes_after_it_on_the_way_back():
    """As in a Transformer, whose attention is before the experts: what the last layer reduces hides behind it."""
    passed = []
    model = torch.nn.Sequential(
        torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2), Moe(passed), torch.nn.Linear(2, 2), Moe(passed)
    )
    accelerator = Accelerator(
        my.ModelSpec(
            row_bytes=8,
            expert_bytes=8,
            expert_flops=1.0,
            flops=1e9,
            non_moe_forward=0.05,
            non_moe_backward=0.1,
        )
    )
    accelerator.attach(model)
    assert accelerator.dense_backward == 0.1
    accelerator.begin()
    began = time.monotonic()
    loss = model(torch.tensor([1, 2])).sum()
    forward = time.monotonic()
    assert forward - began >= 0.1
    loss.backward()
    ended = time.monotonic()
    last, first = passed
    assert last - forward < 0.05, "something was waited for before the last layer"
    assert first - last >= 0.1
    assert ended - first >= 0.1
    assert (accelerator.waits, accelerator.late) == (4, 0)
    assert model[0].weight.grad is not None


def test_a_message_is_measured_from_both_ends_on_one_clock():
    port = my.Port(1e6, 0.0)
    cluster = my.Cluster(2, 1, port, port)
    made = my.schedule(cluster, my.Traffic([[0, 5], [0, 0]], 8), "direct")

    class PlanOf:
        schedule, traffic = made, made.traffic

    # The clocks are 3 and 20 s ahead: posted at 10.75 and 10.5, there at 11.0.
    marks = [[(0, 1, 5, True, 13.75, 13.9)], [(0, 0, 5, False, 30.5, 31.0)]]
    found = measured_timeline(
        cluster, Flown(PlanOf(), False, 10.0, 11.0, []), marks, np.array([3.0, 20.0]), Network.CLUSTER
    )
    assert found.provenance == Provenance.measured(Network.CLUSTER)
    assert found.messages.tolist() == [(0, 0, 1, 5)]
    assert found.start_M.tolist() == [0.0]
    assert np.isclose(found.makespan, 0.25)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"modes": ("plane",)}, UnknownName),
        ({"scheduler": "faster"}, UnknownName),
        ({"planner": "prophecy"}, UnknownName),
        ({"steps": 0}, MoeyardError),
        ({"checkpoint_every": -1}, MoeyardError),
        ({"remeasure_every": -1}, MoeyardError),
        ({"compute": -1.0}, MoeyardError),
        ({"timeout": math.nan}, MoeyardError),
        ({"learning_rate": math.inf}, MoeyardError),
    ],
)
def test_options_are_checked(wrong, kind):
    with pytest.raises(kind):
        Options("out", **wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"family": "frob"}, "frob"),
        ({"config": {"frob": 1}}, "frob"),
        (
            {"config": {"hidden_size": math.nan}},
            "--set hidden_size=nan: it must be a whole number of at least 1",
        ),
        ({"config": {"num_local_experts": 0}}, "--set num_local_experts=0: it must be"),
        ({"config": {"rms_norm_eps": "x"}}, "--set rms_norm_eps=x: "),
        ({"text": "no-such-file"}, "no-such-file"),
        ({"skew": "no-such-trace"}, "no-such-trace"),
        ({"config": {"num_local_experts": 12}, "skew": "mixtral-8"}, "12"),
        ({"codec": "bits:1,2=pick:8"}, "names layer 2"),
    ],
)
def test_what_the_ranks_would_stumble_over_is_said_before_there_are_any(wrong, says):
    with pytest.raises(MoeyardError, match=says):
        check(Options("out", **wrong))


def test_a_codec_for_one_datacenter_is_refused_before_an_earlier_run_is_set_aside(tmp_path):
    done = tmp_path / "domains+codec" / "done.json"
    done.parent.mkdir()
    done.write_text("{}")
    with pytest.raises(MoeyardError, match="bits:1@all"):
        in_lab("lab-2x2", Options(str(tmp_path), modes=("domains+codec",)), quiet=True)
    assert done.exists()


def slow_divide(begin, end, spans, grain=1000):
    """Moment by moment: the first part that covers it."""
    found = dict.fromkeys(PARTS, 0.0)
    width = (end - begin) / grain
    for i in range(grain):
        at = begin + (i + 0.5) * width
        kinds = {kind for kind, a, b in spans if a <= at < b}
        found[next((part for part in PARTS if part in kinds), "compute")] += width
    return found


@given(
    spans=st.lists(
        st.tuples(st.sampled_from([*PARTS, "dense"]), st.integers(-20, 120), st.integers(-20, 120)),
        max_size=12,
    )
)
def test_the_parts_of_a_rank_add_up_whatever_overlaps(spans):
    found = divide(0.0, 100.0, [(kind, float(a), float(b)) for kind, a, b in spans])
    assert sum(found.values()) == pytest.approx(100.0)
    assert found == pytest.approx(slow_divide(0.0, 100.0, spans))


def test_a_rank_waits_until_the_last_has_come_and_then_exchanges():
    own, arrived = np.array([[1.0, 5.0], [6.0, 7.0], [8.0, 9.0]]), np.array([3.0, 6.0, 12.0])
    found = divide(0.0, 10.0, exchange_spans(own, arrived))
    # Of the third it needed nothing from the last rank: it was done before that one came.
    assert found == {"exchange": 3.0, "wait": 3.0, "plan": 0.0, "compute": 4.0}


@pytest.mark.parametrize(
    ("shaped", "machines", "device", "network"),
    [
        (True, 1, "cpu", Network.SHAPED),
        (False, 1, "cpu", Network.LOOPBACK),
        (None, 1, "cpu", Network.LOOPBACK),  # torchrun on one machine: nobody shaped anything
        (None, 2, "cpu", Network.CLUSTER),
        (None, 1, "cuda", Network.CLUSTER),
    ],
)
def test_the_network_is_what_it_is(shaped, machines, device, network):
    assert label(shaped, machines, device) is network


def test_ranks_that_share_a_gpu_have_only_the_sockets_of_its_machine():
    assert label(None, 1, "cuda", shared=True) is Network.LOOPBACK
    assert label(None, 2, "cuda", shared=True) is Network.CLUSTER


@pytest.mark.parametrize(
    ("given", "gpus", "says"),
    [
        ({"device": "cuda"}, 0, "torch sees no GPU here"),
        ({"device": "auto", "share_gpu": True}, 0, "--share-gpu, but the ranks compute on CPUs"),
        ({"device": "auto"}, 1, "8 ranks on this machine, but 1 GPU; start 1, or add --share-gpu"),
        ({"device": "auto"}, 3, "8 ranks on this machine, but 3 GPUs"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, given, gpus, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(MoeyardError, match=says):
        open_world(Options("out", **given), in_lab=False)


def test_ranks_that_share_a_gpu_are_hosts_to_nccl(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda name: seen.append((name, os.environ["NCCL_HOSTID"]))
    )
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "5"), ("LOCAL_WORLD_SIZE", "8"), ("NCCL_HOSTID", "")):
        monkeypatch.setenv(name, value)
    for name in SHARED:
        monkeypatch.setenv(name, "")
    open_world(Options("out", share_gpu=True), in_lab=False)
    assert seen == [1, ("nccl", "rank5")]
    assert {name: os.environ[name] for name in SHARED} == SHARED


def test_a_lab_stays_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []
    monkeypatch.setattr(dist, "init_process_group", seen.append)
    open_world(Options("out"), in_lab=True)
    assert seen == ["gloo"]


class At:
    """An event of a device, so many milliseconds after another."""

    def __init__(self, at):
        self.at = at

    def elapsed_time(self, other):
        return other.at - self.at


def test_times_of_a_device_become_the_clocks():
    log = StepLog()
    log.queued(Queued("plan", True, At(130.0), At(150.0), [(0, 3, 7, True)]))
    log.read(At(100.0), 5.0)
    assert log.queued_ == []
    (one,) = log.flown
    assert (one.plan, one.backward, one.began, one.ended) == ("plan", True, 5.03, 5.05)
    assert one.marks == [Mark(0, 3, 7, True, 5.03, 5.05)]


def test_what_nobody_counted_is_modelled():
    for counted, source in ((True, Source.MEASURED), (False, Source.MODELLED)):
        found = origins(Network.SHAPED, True, counted=counted)
        assert found["rows_per_rail"].source is source
        assert found["rows_per_rail"].network is Network.SHAPED
        assert {key for key, one in found.items() if one.emulated} == {
            "iteration_s", "seconds", "tokens_per_s", "wait_s", "early_s", "parts_s", "spans",
        }  # fmt: skip


LAB = {"lab": "lab-2x2", "network": "auto"}


def test_a_new_run_sets_old_checkpoints_aside_and_forgets_what_was_done(tmp_path):
    options = Options(str(tmp_path), modes=("plain",))
    (tmp_path / "plain" / "checkpoints" / "step-00000007").mkdir(parents=True)
    save_done(options, "plain", {"summary": {}})
    for old in ("run.json", "plain/metrics.jsonl"):
        (tmp_path / old).write_text("{}")
    begin(options, LAB)
    assert not (tmp_path / "run.json").exists()  # or whoever watches would take it for ended
    assert not (tmp_path / "plain" / "metrics.jsonl").exists()
    assert (tmp_path / "run.json.1").exists()  # nothing is lost
    assert (tmp_path / "plain" / "metrics.jsonl.1").exists()
    assert not (tmp_path / "plain" / "checkpoints").exists()
    assert (tmp_path / "plain" / "checkpoints.1" / "step-00000007").exists()
    assert load_done(replace(options, resume=True)) == {}


def test_where_there_is_nothing_to_resume_it_says_so(tmp_path, capsys):
    begin(Options(str(tmp_path / "mistyped"), modes=("plain",), resume=True), LAB)
    assert (
        capsys.readouterr().err
        == f"moeyard: nothing to resume in {tmp_path / 'mistyped'}: a new run begins\n"
    )


@pytest.mark.parametrize(
    ("steps", "warmup", "told"),
    [(6, 2, "6, timed from step 3 on"), (2, 1, "2, timed from step 2 on; give more"), (1, 0, "the first, ")],
)
def test_which_steps_the_times_are_of(steps, warmup, told):
    assert told in show_steps(Options("out", steps=steps, warmup=warmup))


def test_a_resumed_run_keeps_what_is_done(tmp_path):
    options = Options(str(tmp_path), modes=("plain", "moeyard"), config={"hidden_size": 64})
    begin(options, LAB)
    (tmp_path / "plain").mkdir()
    facts = {"cluster": {}, "network": "shaped", "conditions": {"accelerator": "none", "machine": "2 cores"}}
    done = {"summary": {"loss": 1.0, "late": None, "provenance": {}}, "facts": facts}
    save_done(options, "plain", done)
    again = replace(options, resume=True, timeout=5.0, checkpoint_every=3)  # these change no figure
    begin(again, LAB)
    assert load_done(again) == {"plain": done}
    assert load_done(options) == {}
    save_done(options, "plain", {"summary": {"loss": 1.0}, "facts": facts})
    with pytest.raises(InvalidFile, match=r"done\.json: .*\[summary\]: missing key 'late'"):
        begin(again, LAB)


def test_what_a_killed_run_wrote_last_is_dropped_and_the_rest_checked(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 0, "loss": 2.0}', '{"event": "x", "step": 0}', '{"step": 1, "loss": 1.0}']
    path.write_text("\n".join(lines) + '\n{"step": 2, "lo')
    kept, steps = read_metrics(path, 5)
    assert (kept, [step["step"] for step in steps]) == (lines, [0, 1])
    assert read_metrics(path, 1)[0] == lines[:2]
    assert read_metrics(tmp_path / "none", 5) == ([], [])
    with pytest.raises(InvalidFile, match=r"metrics\.jsonl: its steps are not those of one run"):
        summarise(path, steps, 0)
    path.write_text("\n".join([lines[0], '{"step": 2, "lo', lines[2]]) + "\n")
    with pytest.raises(InvalidFile, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(path, 5)


@pytest.mark.parametrize(
    ("other", "where", "says"),
    [
        ({"batch": 2}, LAB, "--batch was 8, now 2;"),
        ({"skew": "mixtral-8"}, LAB, "--skew was not given, now mixtral-8;"),
        ({"modes": ("moeyard",)}, LAB, "--mode was plain,moeyard, now moeyard;"),
        (
            {"steps": 17, "learning_rate": 0.1},
            LAB,
            "--steps was 16, now 17; --learning-rate was 0.001, now 0.1;",
        ),
        ({}, LAB | {"lab": "lab-4x4"}, "--lab was lab-2x2, now lab-4x4;"),
    ],
)
def test_a_resumed_run_is_asked_for_the_same(tmp_path, other, where, says):
    options = Options(str(tmp_path))
    begin(options, LAB)
    with pytest.raises(MoeyardError, match=re.escape(f"--resume with other options: {says}")):
        begin(replace(options, resume=True, **other), where)


def test_a_folder_that_does_not_say_what_it_is_cannot_be_resumed(tmp_path):
    (tmp_path / "plain").mkdir()
    with pytest.raises(InvalidFile, match=r"options\.json"):
        begin(Options(str(tmp_path), resume=True), LAB)
    begin(Options(str(tmp_path / "new"), resume=True), LAB)  # nothing there yet: a first run
    assert (tmp_path / "new" / "options.json").exists()


def test_late_maths_is_said_of_which_rank_and_mode():
    late = {"plain": {"mean": 0.02, "worst": 0.1, "worst_rank": 3}, "moeyard": None}
    assert (
        late_maths(late)
        == "; real maths took longer than the emulated in: plain 2% of the waits (worst rank 3: 10%)"
    )
    assert late_maths({"moeyard": None}) == ""
