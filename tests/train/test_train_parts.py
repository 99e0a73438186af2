"""The parts of a training run, each alone."""

import math
import time

import numpy as np
import pytest
import torch

import moeyard as my
from moeyard.errors import InvalidDemand, InvalidFile, MoeyardError, UnknownName
from moeyard.train.accelerator import Accelerator
from moeyard.train.meter import Flown, measured_timeline
from moeyard.train.options import Options
from moeyard.train.prepare import check
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


def test_a_message_is_measured_from_both_ends_on_one_clock():
    port = my.Port(1e6, 0.0)
    cluster = my.Cluster(2, 1, port, port)
    made = my.schedule(cluster, my.Traffic([[0, 5], [0, 0]], 8), "direct")

    class PlanOf:
        schedule, traffic = made, made.traffic

    marks = [[(0, 1, 5, True, 10.0, 10.9)], [(0, 0, 5, False, 30.5, 31.0)]]  # rank 1's clock is 20 s ahead
    found = measured_timeline(cluster, Flown(PlanOf(), False, 10.0, 11.0, []), marks, np.array([0.0, 20.0]))
    assert found.messages.tolist() == [(0, 0, 1, 5)]
    assert found.start_M.tolist() == [0.0]  # posted at 10.0 and 10.5
    assert np.isclose(found.makespan, 0.5)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"modes": ("plane",)}, UnknownName),
        ({"scheduler": "faster"}, UnknownName),
        ({"planner": "prophecy"}, UnknownName),
        ({"steps": 0}, MoeyardError),
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
        ({"text": "no-such-file"}, "no-such-file"),
        ({"skew": "no-such-trace"}, "no-such-trace"),
        ({"config": {"num_local_experts": 12}, "skew": "mixtral-8"}, "12"),
    ],
)
def test_what_the_ranks_would_stumble_over_is_said_before_there_are_any(wrong, says):
    with pytest.raises(MoeyardError, match=says):
        check(Options("out", **wrong))
