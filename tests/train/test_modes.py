"""Modes side by side: names, turns, and what is told apart by pairing steps."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard.errors import UnknownName
from moeyard.provenance import Network
from moeyard.report.attribution import (
    attribution,
    attribution_data,
    compare,
    hidden,
    interval,
    mode_data,
    paired,
    table_rows,
)
from moeyard.report.load import Mode, Run, loss_gap
from moeyard.report.run import _headlines
from moeyard.train.modes import CHAIN, CODED, EVERY, MODES, modes_of
from moeyard.train.options import Options
from moeyard.train.turns import Runner, run_side_by_side, turns


def test_modes_are_named_listed_and_repeated():
    assert modes_of(["both"]) == ("plain", "moeyard")
    assert modes_of(["plain,direct", "all", "direct"]) == ("plain", "direct", "all")
    assert modes_of(["all-of-them"]) == EVERY
    assert set(EVERY) == set(MODES) - {"moeyard", *CODED}  # in one datacenter there is nothing to code
    assert CODED == ("domains+codec", "auto+codec")
    assert "domains+codec" in modes_of(["wan"])
    with pytest.raises(UnknownName, match="did you mean 'shadow'"):
        modes_of(["plain,shadwo"])


def test_what_is_attributed_is_the_only_difference():
    options = Options("out", modes=EVERY)
    way = {name: options.yard(name) for name, _ in CHAIN}
    assert way["plain"] == way["direct"] | {"transport": "collective"}
    assert way["home"] == way["direct"] | {"scheduler": "auto"}
    assert way["sync"] == way["home"] | {"planner": "quota", "policy": "quota", "ahead": False, "chunks": 1}
    assert way["chunks"] == way["sync"] | {"chunks": "auto"}
    assert way["serial"] == way["chunks"] | {"ahead": True, "overlap": False}
    assert way["all"] == {name: value for name, value in way["serial"].items() if name != "overlap"}
    assert options.yard("moeyard") == way["all"]
    for name in ("domains", "auto"):
        assert options.yard(f"{name}+codec") == options.yard(name) | {"codec": "bits:1"}
        assert replace(options, codec="pick:8").yard(f"{name}+codec")["codec"] == "pick:8"


@given(
    firsts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    steps=st.integers(1, 9),
    turn=st.integers(1, 4),
)
def test_every_mode_makes_its_steps_once_and_in_order(firsts, steps, turn):
    order = list(turns(firsts, steps, turn))
    for at, first in enumerate(firsts):
        assert [step for one, step in order if one == at] == list(range(first, steps))
    # Nobody is more than a turn ahead of anybody who could have gone on.
    made = dict.fromkeys(range(len(firsts)), -1)
    for at, step in order:
        made[at] = step
        behind = min((made[one] for one, first in enumerate(firsts) if first == 0), default=step)
        assert step - behind <= 2 * turn


class FakeTrainer:
    """Takes steps; is asked to stop at one of them."""

    def __init__(self, first=0, stops_at=None):
        self.first, self.stops_at, self.made, self.saved = first, stops_at, [], []

    def step(self, step, journal, stop):
        self.made.append(step)
        return stop or step == self.stops_at

    def save_last(self, folder):
        self.saved.append((folder, self.made[-1] if self.made else None))


class FakeJournal:
    def __init__(self, checkpoints):
        self.checkpoints, self.faults = checkpoints, []

    def cause_faults(self, step):
        self.faults.append(step)


def side_by_side(trainers, asked=False, **more):
    runners = [Runner(one, FakeJournal(f"folder {i}")) for i, one in enumerate(trainers)]
    stopped = run_side_by_side(runners, Options("out", **more), SimpleNamespace(asked=lambda: asked))
    return stopped, runners


def test_a_run_that_is_stopped_saves_every_mode_where_it_is():
    trainers = [FakeTrainer(), FakeTrainer(stops_at=1), FakeTrainer()]
    stopped, _ = side_by_side(trainers, steps=4, turn=1)
    assert stopped
    # Round 0: 0, 1, 2; round 1 begins with the second mode, which stops.
    assert [one.made for one in trainers] == [[0], [0, 1], [0]]
    assert [one.saved for one in trainers] == [[("folder 0", 0)], [("folder 1", 1)], [("folder 2", 0)]]


def test_a_rail_breaks_once_for_all_modes():
    stopped, runners = side_by_side([FakeTrainer(), FakeTrainer(first=2)], steps=3, turn=2)
    assert not stopped
    assert sorted(step for one in runners for step in one.journal.faults) == [0, 1, 2]
    assert [one.trainer.made for one in runners] == [[0, 1, 2], [2]]
    assert not any(one.trainer.saved for one in runners)


def test_who_begins_rotates():
    assert list(turns([0, 0], 4, 2)) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (0, 2), (0, 3)]


def mode_of(name, seconds, gather=0.0, first=0, predicted=None):
    steps = [
        {
            "step": first + i,
            "seconds": s,
            "loss": 3.0 - i,
            "gather_s": gather,
            "plan_s": 0.01,
            "provenance": {},
        }
        for i, s in enumerate(seconds)
    ]
    return Mode(name, {"predicted": predicted}, steps, [], None, None, [], {})


def run_of(*modes, warmup=1):
    return Run("a run", {}, True, Network.SHAPED, modes, warmup)


def test_ratios_are_of_the_same_step():
    # The machine is twice as slow in every other step: the single times vary, their ratios do not.
    slow = np.array([1, 2, 1, 2, 1, 2, 1.0])
    run = run_of(mode_of("plain", 8 * slow), mode_of("direct", 4 * slow), mode_of("all", 2 * slow))
    found = attribution(run)
    assert [(one.what, one.of, one.over) for one in found] == [
        ("engine", "direct", "plain"),
        ("schedule + replicas + chunks + forecast + overlap", "all", "direct"),
        ("together", "all", "plain"),
    ]
    assert [(one.ratio, one.low, one.high, one.pairs) for one in found] == [
        (2, 2, 2, 6),
        (2, 2, 2, 6),
        (4, 4, 4, 6),
    ]
    assert [one.saved for one in found] == [0.5, 0.5, 0.75]


def test_the_whole_chain_is_told_mode_by_mode():
    run = run_of(
        *(mode_of(name, [9.0, 9.0 - i]) for i, (name, _) in enumerate(CHAIN)), mode_of("shadow", [9, 6])
    )
    found = attribution(run)
    assert [one.what for one in found[:6]] == [
        "engine", "schedule", "replicas", "chunks", "forecast", "overlap",
    ]  # fmt: skip
    assert [(one.of, one.over) for one in found[6:]] == [
        ("all", m) for m in ("plain", "direct", "home", "sync", "chunks", "shadow")
    ]


def test_modes_that_share_no_step_are_not_compared():
    run = run_of(mode_of("plain", [1.0, 1.0]), mode_of("direct", [1.0], first=7))
    assert attribution(run) == []
    assert compare(run, "engine", run.modes[1], run.modes[0]) is None


def test_steps_before_a_resume_do_not_count():
    one, other = mode_of("plain", [5.0, 5.0, 1.0]), mode_of("direct", [5.0, 5.0, 1.0])
    one.steps[1]["provenance"] = {"another": "network"}
    assert paired(run_of(one, other), one, other)[0].tolist() == [1.0]


@pytest.mark.parametrize("count", [6, 7, 8, 12, 22, 41])
def test_the_interval_holds_the_median_in_95_of_100_trials_and_narrows(count):
    values = np.random.default_rng(count).lognormal(size=(2000, count))  # its median is 1
    found = [interval(one) for one in values]
    held = np.mean([low <= 1 <= high for low, high in found])
    assert held > 0.94  # at least 0.95, less three times the chance of 2000 draws
    assert np.mean([high - low for low, high in found]) < np.mean(np.ptp(values, axis=1)) or count < 9


def test_few_pairs_hold_no_interval():
    run = run_of(mode_of("plain", [9, 1, 2, 3, 4, 5.0]), mode_of("direct", [9, 1, 2, 2, 4, 5.0]))
    (found,) = attribution(run)
    assert found.pairs == 5
    assert math.isnan(found.low)
    (told,) = attribution_data([found])
    assert (told["low"], told["high"]) == (None, None)
    assert json.loads(json.dumps(told)) == told | {"quartiles": list(told["quartiles"])}
    assert "needs 6 pairs" in table_rows([found])[0]


def test_hidden_is_what_the_foreground_took_longer():
    serial, overlapped = (
        mode_of("serial", [9, 4.0, 5.0], gather=1.0),
        mode_of("all", [9, 3.4, 4.4], gather=1.5),
    )
    run = run_of(serial, overlapped)
    assert hidden(run, overlapped) == pytest.approx(0.6)
    assert hidden(run, serial) is None
    assert hidden(run_of(overlapped), overlapped) is None
    assert hidden(run_of(mode_of("serial", [9, 4.0]), overlapped), overlapped) is None  # nothing was gathered


def test_json_says_what_each_mode_took():
    predicted = {"seconds": {"1": 2.0, "2": 4.0}, "hideable": 0.9}
    run = run_of(
        mode_of("serial", [9, 4.0, 5.0], gather=1.0), mode_of("all", [9, 3.5, 4.5], predicted=predicted)
    )
    found = json.loads(json.dumps(mode_data(run)))
    assert [one["name"] for one in found] == ["serial", "all"]
    assert found[1] == {
        "name": "all", "steps": [0, 1, 2], "seconds": [9, 3.5, 4.5], "loss": [3.0, 2.0, 1.0],
        "hidden": 0.5, "predicted_s": 3.0, "plan_wait_s": 0.01,
    }  # fmt: skip
    assert found[0]["predicted_s"] is None


def test_options_name_the_links():
    with pytest.raises(UnknownName, match="kind of links"):
        replace(Options("out"), links="guessed")


def losses_of(name, *losses, exchange=1.0):
    mode = mode_of(name, [1.0] * len(losses))
    steps = [step | {"loss": loss} for step, loss in zip(mode.steps, losses, strict=True)]
    summary = {"iteration_s": 1.0, "exchange_s": exchange, "x_bound": 1.2, "tokens_per_s": 1.0}
    return replace(mode, steps=steps, summary=summary)


def test_the_gap_of_losses_is_between_any_two_modes():
    modes = (
        losses_of("plain", 3.0, 2.0),
        losses_of("home", 3.0, 2.0 + 9e-6),
        losses_of("all", 3.0, 2.0 - 9e-6),
    )
    assert loss_gap(run_of(*modes)) == pytest.approx(1.8e-5)
    assert loss_gap(run_of(losses_of("plain", 3.0))) == 0.0


def test_a_loss_that_is_no_number_is_not_the_same_loss():
    run = run_of(losses_of("plain", 3.0, 2.0, 1.0), losses_of("all", 3.0, math.nan, 1.0))
    assert math.isnan(loss_gap(run))
    assert not loss_gap(run) <= run.same_loss
    assert ("no number", "largest difference of the loss over all steps") in _headlines(run)


def test_slower_exchanges_are_not_called_faster():
    faster = run_of(losses_of("plain", 3.0, exchange=1.0), losses_of("all", 3.0, exchange=0.8))
    slower = run_of(losses_of("plain", 3.0, exchange=1.0), losses_of("all", 3.0, exchange=1.25))
    assert ("1.25 x", "faster exchanges") in _headlines(faster)
    assert ("1.25 x", "slower exchanges") in _headlines(slower)
