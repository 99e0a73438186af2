"""Advice: little where there is little to gain, what replaying says where there is, and a line that a yard takes."""

import ast
import inspect
import json
from dataclasses import replace

import numpy as np
import pytest

import moeyard as my
from moeyard.advise import SMALLER, WORTH, advise, newest, one_step, sample, saving, with_tokens
from moeyard.breakeven import experts_by_wan, tokens_by_rate
from moeyard.cli.advise import _more_or_less
from moeyard.demands import Shape, demand_over_time
from moeyard.errors import MoeyardError
from moeyard.formats.models import model_config, model_names
from moeyard.model import STAND_IN, num_experts, top_k
from moeyard.replay import Job, replay

CLUSTER = my.Cluster(2, 2, scale_up=my.Port(1e11, 1e-6), scale_out=my.Port(1e10, 1e-5), name="small")
SHAPE = Shape(records=5, layers=2, experts=8, tokens=16384, top_k=2)


@pytest.fixture(scope="module")
def skewed():
    return advise(CLUSTER, demand_over_time("hot-set:0.7,experts=1", 4, SHAPE), STAND_IN)


def test_a_balanced_trace_has_little_to_gain():
    # few enough rows that moving experts instead of them would not pay
    found = advise(CLUSTER, demand_over_time("balanced", 4, replace(SHAPE, tokens=2048)), STAND_IN)
    assert not found.worth
    assert all(found.saving(choice) < WORTH for choice in found.alone.values())


def test_on_a_skewed_trace_the_saving_is_what_replaying_says(skewed):
    assert skewed.worth
    trace, past = sample(demand_over_time("hot-set:0.7,experts=1", 4, SHAPE))
    both = skewed.together
    ways = ((("static",), ("direct",), None), ((both.planner,), (both.scheduler,), both.slots))
    seconds = []
    for planners, schedulers, slots in ways:
        done = replay(Job(CLUSTER, trace, STAND_IN, planners, schedulers, slots=slots))
        seconds.append(done.ways[0].figures["step_s"][past:].mean() * STAND_IN.layers / trace.num_layers)
    assert skewed.today.step_s == pytest.approx(seconds[0])
    assert both.step_s == pytest.approx(seconds[1])
    assert skewed.memory_bytes == both.slots * (STAND_IN.layers + 2) * STAND_IN.expert_bytes


def test_all_together_costs_no_more_than_any_idea_alone(skewed):
    few = advise(my.Cluster.load("lab-2x2"), demand_over_time("balanced", 4, FEW), STAND_IN)
    for found in (skewed, few):
        assert found.together.step_s <= min(one.step_s for one in (found.today, *found.alone.values()))


def test_the_most_rows_of_a_rank_are_those_of_the_fullest_record(skewed):
    trace, past = sample(demand_over_time("hot-set:0.7,experts=1", 4, SHAPE))
    rows = trace.counts[past:].sum(axis=2).reshape(-1, 4, 2).sum(axis=2)  # two experts at home on each rank
    assert skewed.most_rows == pytest.approx((rows.max(axis=1) / rows.mean(axis=1)).max())


FEW = Shape(records=3, layers=1, experts=8, tokens=64, top_k=2)


def test_where_fewer_tokens_stop_paying_the_best_for_fewer_tokens_is_asked():
    """Domains are for many tokens; on a lab's slow network schedules save on few, too."""
    lab, trace = (
        my.Cluster.load("lab-2x2"),
        demand_over_time("hot-set:0.5,experts=2", 4, replace(FEW, tokens=65536)),
    )
    found = advise(lab, trace, STAND_IN, slots=2)
    base = Job(lab, newest(sample(trace)[0], 1), STAND_IN)
    kept = [saving(with_tokens(base, share), found.together) >= WORTH for share in SMALLER]
    fresh = [advise(lab, with_tokens(base, share).trace, STAND_IN, slots=2).worth for share in SMALLER]
    assert fresh != kept  # else this trace says nothing of the matter
    paying = [share for share, pays in zip(SMALLER, fresh, strict=True) if pays]
    assert found.least_tokens == max(
        (share for share in SMALLER if share < min(paying, default=1)), default=None
    )


def test_fewer_tokens_have_less_of_the_rest_of_a_layer_too():
    model = my.load_model("mixtral-8x7b", tokens_per_rank=4096)
    few = with_tokens(Job(CLUSTER, demand_over_time("balanced", 4, SHAPE), model), 1 / 4).model
    asked = my.load_model("mixtral-8x7b", tokens_per_rank=1024)
    assert few.non_moe_forward == pytest.approx(asked.non_moe_forward)
    assert few.non_moe_backward == pytest.approx(asked.non_moe_backward)
    assert few.router == pytest.approx(asked.router)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_handful_of_tokens_gets_advice_too(tokens):
    found = advise(CLUSTER, demand_over_time("balanced", 4, replace(FEW, tokens=tokens)), STAND_IN, slots=1)
    assert found.least_tokens in (None, *SMALLER)


def test_records_without_rows_are_no_reason_to_fail():
    counts = demand_over_time(
        "hot-set:0.7,experts=1", 4, replace(FEW, records=4, tokens=4096, layers=2)
    ).counts.copy()
    counts[-1], counts[-2, 0] = 0, 0
    found = advise(CLUSTER, my.Trace(counts), STAND_IN, slots=1)
    assert np.isfinite(found.saving(found.together))
    base = Job(CLUSTER, sample(my.Trace(counts))[0], STAND_IN)
    assert np.array_equal(newest(base.trace, 0).counts, counts[-2:-1, 1:])
    assert np.isfinite(tokens_by_rate(base, found.together, factors=(1e-6, 1.0)).saving_YX).all()
    with pytest.raises(MoeyardError, match="the last 6 records have no rows in the 2 layers"):
        advise(CLUSTER, my.Trace(np.concatenate([counts, np.zeros_like(counts[[0] * 6])])), STAND_IN)


def test_nothing_is_advised_on_counts_that_nobody_has():
    with pytest.raises(MoeyardError, match=r"forecast 'oracle'.*give ahead, last, ema or trend"):
        advise(CLUSTER, demand_over_time("balanced", 4, FEW), STAND_IN, forecast="oracle")


def test_where_it_pays_is_what_replaying_says(skewed):
    trace, _ = sample(demand_over_time("hot-set:0.7,experts=1", 4, SHAPE))
    base = Job(CLUSTER, trace, STAND_IN)
    grid = tokens_by_rate(base, skewed.together, factors=(0.25, 1.0))
    slow = my.Cluster(2, 2, scale_up=my.Port(1e11, 1e-6), scale_out=my.Port(2.5e9, 1e-5))
    seconds = []
    for planner, scheduler, slots in (
        ("static", "direct", None),
        (skewed.together.planner, "auto", skewed.together.slots),
    ):
        job = Job(slow, my.Trace(trace.counts[-2:, :1]), STAND_IN, (planner,), (scheduler,), slots=slots)
        seconds.append(replay(job).ways[0].figures["step_s"][-1])
    assert grid.saving_YX[1, 0] == pytest.approx(1 - seconds[1] / seconds[0])
    assert grid.x.tolist() == [2.5e9, 1e10]
    assert experts_by_wan(base, skewed.together) is None
    two = my.Cluster(
        2,
        2,
        scale_up=my.Port(1e11, 1e-6),
        scale_out=my.Port(1e10, 1e-5),
        datacenters=2,
        wan=my.Port(1e9, 1e-3),
    )
    wan = experts_by_wan(Job(two, trace, STAND_IN), skewed.together, factors=(1.0,))
    assert wan.saving_YX.shape == (1, 1)


def test_a_step_on_a_clock_takes_as_long_as_its_record(skewed):
    trace, _ = sample(demand_over_time("hot-set:0.7,experts=1", 4, SHAPE))
    base = Job(CLUSTER, trace, STAND_IN)
    done = replay(Job(CLUSTER, trace, STAND_IN, ("static",), ("direct",)))
    assert one_step(base, skewed.today).makespan == pytest.approx(done.ways[0].figures["step_s"][-1])


def test_the_line_to_paste_is_one_that_a_yard_takes(skewed):
    yr = pytest.importorskip("moeyard.runtime", exc_type=ImportError)
    call = ast.parse(skewed.together.yard("h200-4x8"), mode="eval").body
    given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    assert ast.unparse(call.func) == "yr.Yard"
    inspect.signature(yr.Yard).bind(**given)
    assert given.pop("cluster") in my.formats.preset_names()
    from moeyard.runtime.options import Options

    Options(**given)


def test_more_slots_are_taken_only_where_they_pay(skewed):
    trace = demand_over_time("hot-set:0.7,experts=1", 4, SHAPE)
    less = advise(CLUSTER, trace, STAND_IN, slots=1)
    assert less.together.slots in (None, 1)
    assert skewed.together.step_s <= less.together.step_s * 1.0001
    if skewed.together.slots == 1:
        assert less.together.step_s == skewed.together.step_s


def test_what_rounds_to_nothing_is_no_minus_nothing():
    told = [_more_or_less(x) for x in (0.004, -0.004, -0.0, 0.006, -0.006, 0.5, -0.5)]
    assert told == ["as long", "as long", "as long", "1% less", "1% more", "50% less", "50% more"]


@pytest.mark.parametrize("name", model_names())
def test_every_named_model_has_its_published_sizes(name):
    """Parameters of all routed experts, in billions, from each model's card or paper."""
    routed = {  # x 10^9
        "dbrx": 126.8, "deepseek-v2-lite": 14.4, "deepseek-v3": 653.9, "gpt-oss-120b": 114.7, "mixtral-8x22b": 135.3,
        "mixtral-8x7b": 45.1, "olmoe-1b-7b": 6.4, "qwen3-235b-a22b": 227.1, "qwen3-30b-a3b": 29.0,
    }  # fmt: skip
    config, model = model_config(name), my.load_model(name, tokens_per_rank=4096)
    experts = num_experts(config) * model.layers * model.expert_bytes / 2 / 1e9
    assert experts == pytest.approx(routed[name], rel=0.01)
    assert 1 <= top_k(config) <= 8
    assert model.non_moe_forward > 0


MADE = ("--experts", "8", "--top-k", "2", "--records", "3", "--layers", "1", "--jobs", "1", "--slots", "1")


def test_the_command_fits_a_screen_and_its_json_has_the_keys(call):
    status, out, _ = call("advise", "h200-2x8", "hot-set:0.7", *MADE)
    assert status == 0
    assert len(out.splitlines()) <= 24
    assert "switch on:" in out
    assert 'yr.Yard(cluster="h200-2x8"' in out
    data = json.loads(call("advise", "h200-2x8", "hot-set:0.7", *MADE, "--json")[1])
    assert {"today_s", "savings", "yard", "memory_bytes", "worth"} <= set(data)
    assert set(data["savings"]) == {"rails", "fast", "replicas", "domains", "dedup", "together"}
    assert "knew nothing of one another" in out
    assert data["worth"] is True
    made = ("--experts", "32", "--top-k", "2", "--tokens", "1024", *MADE[4:])
    status, out, _ = call("advise", "h200-2x8", "balanced", *made)
    assert "little to gain" in out
    assert "Yard" not in out


def test_tokens_that_cross_once_are_advised_where_it_is_known_how_many_choices_they_have(call):
    """Eight choices over two nodes of slow nics: most of what crosses need not."""
    rest = ("--experts", "32", "--records", "3", "--layers", "1", "--jobs", "1", "--slots", "1", "--json")
    data = json.loads(call("advise", "lab-2x2", "balanced", "--top-k", "8", "--tokens", "1024", *rest)[1])
    assert data["savings"]["dedup"] > 0.1 * data["today_s"]
    assert data["choices"]["together"]["dedup"] == "auto"
    assert 'dedup="auto"' in data["yard"]
    one = json.loads(call("advise", "lab-2x2", "balanced", "--top-k", "1", "--tokens", "1024", *rest)[1])
    assert "dedup" not in one["savings"]


def test_loads_of_one_record_are_advised_on_too(call, tmp_path):
    np.save(tmp_path / "loads.npy", np.array([[60000, 1000, 1000, 1000, 1000, 1000, 1000, 1000] * 2]))
    rest = ("--top-k", "2", "--jobs", "1", "--slots", "1")
    data = json.loads(
        call("advise", "h200-2x8", tmp_path / "loads.npy", *rest, "--tokens", "16384", "--json")[1]
    )
    assert data["worth"] is True
    assert data["savings"]["replicas"] > 0.2 * data["today_s"]
    assert "one record" in data["conditions"]["records"]
    assert "spread evenly over 16" in data["conditions"]["folded"]
