"""The step on one clock: hand-computed timelines, the rules of the resources, and the closed form as its special case."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import FREE, domains, flat, jobs, model, ring

from moeyard.assign import assign
from moeyard.cluster import Cluster, Port
from moeyard.cost import chunks_worth, prophet_seconds, step_cost, stream_seconds
from moeyard.demand import Demand
from moeyard.errors import InvalidModel, InvalidPlacement, UnknownName
from moeyard.placement import Placement
from moeyard.sim.step import simulate_step

ORDER = [
    "non_moe", "dispatch", "experts", "combine", "combine_backward", "experts_backward", "dispatch_backward",
    "non_moe_backward",
]  # fmt: skip


def even(ranks, rows, placement, cluster):
    return assign(cluster, Demand(np.full((ranks, ranks), rows)), placement, "local_first")


def spans(timeline, name):
    """[(layer, first start, last end)] of the operators of a name."""
    own = [i for i, op in enumerate(timeline.operators) if op.name == name]
    return [(timeline.operators[i].layer, timeline.start_OR[i].min(), timeline.end_OR[i].max()) for i in own]


@given(jobs(), st.booleans(), st.booleans())
def test_the_closed_form_is_the_step_over_port_loads(job, overlap, backward):
    cluster, spec, placement, assignment = job
    step = simulate_step(
        cluster, spec, placement, assignment, network="ports", overlap=overlap, backward=backward
    )
    cost = step_cost(cluster, spec, placement, assignment, overlap=overlap, backward=backward)
    assert step.makespan == pytest.approx(cost.total * spec.layers, rel=1e-9)


@given(jobs(equal_speed=True), st.booleans())
def test_so_it_is_when_experts_run_under_the_exchanges(job, backward):
    cluster, spec, placement, assignment = job
    step = simulate_step(
        cluster, spec, placement, assignment, network="ports", pipelined=True, backward=backward
    )
    cost = step_cost(cluster, spec, placement, assignment, pipelined=True, backward=backward)
    assert step.makespan == pytest.approx(cost.total * spec.layers, rel=1e-9)


@given(jobs())
def test_a_rank_computes_one_operator_at_a_time_and_exchanges_do_not_overlap(job):
    cluster, spec, placement, assignment = job
    step = simulate_step(cluster, spec, placement, assignment, network="ports", micro_batches=2)
    for resource in ("compute", "exchange"):
        own = [i for i, op in enumerate(step.operators) if op.resource == resource]
        for rank in range(cluster.num_ranks):
            busy = sorted((step.start_OR[i, rank], step.end_OR[i, rank]) for i in own)
            assert all(b[0] >= a[1] - 1e-12 for a, b in itertools.pairwise(busy))
    assert step.makespan >= step_cost(cluster, spec, placement, assignment).bound * spec.layers * (1 - 1e-9)
    assert (step.compute_share_R <= 1 + 1e-9).all()


def test_a_plain_step_runs_its_operators_in_order():
    cluster = flat(2, 1e6)
    spec = model(layers=1, non_moe_forward=0.1, non_moe_backward=0.2)
    placement = domains(2, 1)
    step = simulate_step(cluster, spec, placement, even(2, 10, placement, cluster), network="ports")
    assert [op.name for op in step.operators] == ORDER
    ends = np.cumsum([0.1, 0.01, 0.02, 0.01, 0.01, 0.04, 0.01, 0.2])
    assert step.end_OR[:, 0] == pytest.approx(ends)
    assert [step.operators[i].name for i in step.critical_path] == ORDER
    assert step.seconds("dispatch") == pytest.approx(0.01)
    assert step.seconds("gather") == 0


def test_in_two_chunks_each_half_travels_behind_the_experts_of_the_other():
    """Halves of 5 ms an exchange and 10 ms the experts: 10 ms of each way's 20 hide."""
    cluster = flat(2, 1e6)
    spec = model(layers=1, non_moe_forward=0.1, non_moe_backward=0.2)
    placement = domains(2, 1)
    served = even(2, 10, placement, cluster)
    step = simulate_step(cluster, spec, placement, served, network="ports", chunks=2)
    assert [end for _, _, end in spans(step, "dispatch")] == pytest.approx([0.105, 0.110])
    assert [end for _, _, end in spans(step, "experts")] == pytest.approx([0.115, 0.125])
    assert [end for _, _, end in spans(step, "combine")] == pytest.approx([0.120, 0.130])
    assert [end for _, _, end in spans(step, "combine_backward")] == pytest.approx([0.135, 0.140])
    assert [end for _, _, end in spans(step, "experts_backward")] == pytest.approx([0.155, 0.175])
    assert [end for _, _, end in spans(step, "dispatch_backward")] == pytest.approx([0.160, 0.180])
    assert step.makespan == pytest.approx(0.38)
    assert chunks_worth(cluster, spec, served) == 2
    auto = simulate_step(cluster, spec, placement, served, network="ports", chunks="auto")
    assert auto.makespan == step.makespan


@pytest.mark.parametrize(("rate", "rows", "expected"), [(1e9, 10, 1), (1e6, 0, 1), (1e6, 1000, 2)])
def test_chunks_are_worth_it_where_an_exchange_takes_long(rate, rows, expected):
    cluster, placement = flat(2, rate), domains(2, 1)
    assert chunks_worth(cluster, model(layers=1), even(2, rows, placement, cluster)) == expected


@given(jobs(), st.booleans())
def test_chunks_keep_the_work_and_where_they_are_taken_they_pay(job, overlap):
    cluster, spec, placement, assignment = job
    how = {"network": "ports", "overlap": overlap}
    one, two, auto = (
        simulate_step(cluster, spec, placement, assignment, chunks=n, **how) for n in (1, 2, "auto")
    )
    assert auto.makespan <= one.makespan * (1 + 1e-9)
    for name in ("experts", "experts_backward"):
        own = [[i for i, op in enumerate(step.operators) if op.name == name] for step in (one, two)]
        work = [
            (step.end_OR[i] - step.start_OR[i]).sum(axis=0) for step, i in zip((one, two), own, strict=True)
        ]
        assert work[0] == pytest.approx(work[1])


def test_a_gather_moves_while_ranks_compute_and_stops_for_an_exchange():
    """Layer 1's gather of 0.5 s: 0.02 s under layer 0's experts, 0.1 s under the dense part, the rest exposed."""
    cluster = flat(2, 1e6)
    spec = model(layers=2, expert_bytes=500_000, non_moe_forward=0.1, non_moe_backward=0.2)
    placement = ring(2, 1)
    assignment = assign(cluster, Demand(np.full((2, 2), 10)), placement, "home")
    step = simulate_step(cluster, spec, placement, assignment, network="ports")
    (_, _, first_end), (_, second, second_end) = spans(step, "gather")
    assert first_end == pytest.approx(0.1 + 0.01 + 0.4)  # under the dense part; pushed aside; then waited for
    assert second == pytest.approx(first_end)
    start = first_end + 0.02 + 0.01 + 0.1 + 0.01  # experts, combine, dense part, dispatch
    assert second_end == pytest.approx(start + 0.5 - 0.02 - 0.1)
    assert spans(step, "experts")[1][1] == pytest.approx(second_end)


def test_on_a_network_wider_than_the_exchanges_use_a_gather_is_not_pushed_aside():
    """Two datacenters gather everything from each other: rows stay inside, so the wan is the gather's alone."""
    cluster = Cluster(4, 1, FREE, Port(1e6, 0.0), datacenters=2, wan=Port(1e6, 0.0))
    spec = model(layers=6, expert_bytes=10_000)
    placement = Placement(np.arange(4), np.tile(np.eye(2, dtype=bool), (2, 2)))
    assignment = even(4, 10, placement, cluster)
    step = simulate_step(cluster, spec, placement, assignment, network="ports", backward=False)
    gathers = spans(step, "gather")
    exchange = 2 * 10 * 1000 / 1e6
    assert gathers[1][2] - gathers[1][1] == pytest.approx(0.02)  # two experts over the uplink
    compute = 4 * 10 * 1e-3
    assert step.makespan == pytest.approx(0.02 - exchange + 6 * (2 * exchange + compute))


def test_no_limit_lets_gathers_run_further_ahead():
    cluster = flat(2, 1e6)
    spec = model(layers=8, expert_bytes=60_000, non_moe_forward=0.1)
    placement = ring(2, 1)
    layers = []
    for layer in range(8):  # only the later layers have experts to gather
        here = placement if layer >= 4 else domains(2, 1)
        layers.append((here, assign(cluster, Demand(np.full((2, 2), 10)), here, "home")))
    spec = spec.but(expert_bytes=250_000)
    args = (cluster, spec, [p for p, _ in layers], [a for _, a in layers])
    one, free = (simulate_step(*args, network="ports", ahead=a, backward=False).makespan for a in (1, None))
    assert free < one


def test_a_faster_rank_goes_on_as_soon_as_its_own_part_is_done():
    cluster = flat(2, 1e6, speed=[1.0, 2.0])
    placement = domains(2, 1)
    step = simulate_step(
        cluster, model(layers=1), placement, even(2, 10, placement, cluster), network="ports", backward=False
    )
    experts = next(i for i, op in enumerate(step.operators) if op.name == "experts")
    assert (step.end_OR[experts] - step.start_OR[experts]) == pytest.approx([0.02, 0.01])


def test_replicas_are_gathered_once_and_reduced_once_per_step():
    cluster = flat(4, 1e6)
    placement = ring(4, 2)
    step = simulate_step(
        cluster, model(layers=3), placement, even(4, 5, placement, cluster), network="ports", micro_batches=4
    )
    names = [op.name for op in step.operators]
    assert names.count("gather") == names.count("reduce") == 3
    assert names.count("dispatch") == 12


def test_planning_ahead_is_free_and_planning_now_is_not():
    cluster = flat(2, 1e6)
    placement = domains(2, 1)
    args = (cluster, model(layers=3), placement, even(2, 10, placement, cluster))
    without = simulate_step(*args, network="ports").makespan
    assert simulate_step(*args, network="ports", planning=0.01).makespan == pytest.approx(without)
    now = simulate_step(*args, network="ports", planning=0.01, plan_ahead=False).makespan
    assert now == pytest.approx(without + 3 * 0.01)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_more_layer_costs_what_prophets_model_says(overlap):
    """In its assumptions: one bandwidth, no latency, ports that gather the same, senders no busier than receivers."""
    ranks, bandwidth = 8, 1e8
    cluster = flat(ranks, bandwidth)
    spec = model(expert_bytes=5_000_000, non_moe_forward=0.01, non_moe_backward=0.02)
    demand = Demand(np.arange(1, 9)[None, :] * np.ones((8, 1), int) * 5)  # skewed: expert 7 gets most
    placement = ring(ranks, 3)
    assignment = assign(cluster, demand, placement, "own")
    several, more = (
        simulate_step(
            cluster, spec.but(layers=n), placement, assignment, network="ports", overlap=overlap
        ).makespan
        for n in (4, 5)
    )
    rows = assignment.rows_RR
    paper = prophet_seconds(
        rows.sum(axis=0) - rows.diagonal(), assignment.rows_R, selected=8, left_out=5, row_bytes=1000,
        expert_bytes=5_000_000, bandwidth=bandwidth, rows_per_second=1000.0, overlap=overlap,
        non_moe_forward=0.01, non_moe_backward=0.02,
    )  # fmt: skip
    assert more - several == pytest.approx(paper + 0.03, rel=1e-9)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("pre_expert", [0.0, 0.003, 0.1])
def test_a_forward_costs_what_the_stream_model_says(size, pre_expert):
    cluster = flat(8, 1e7)
    spec = model(expert_flops=1e-3, non_moe_forward=pre_expert, layers=3)
    placement = domains(8, size)
    step = simulate_step(
        cluster,
        spec,
        placement,
        even(8, 40, placement, cluster),
        network="ports",
        pipelined=True,
        backward=False,
    )
    paper = stream_seconds(
        (8 - size) / 7, data=320_000, expert=50_000, bandwidth=1e7, ranks=8, pre_expert=pre_expert
    )
    assert step.makespan == pytest.approx(3 * paper, rel=1e-6)


def test_exchange_times_can_come_from_planned_and_simulated_schedules():
    cluster = Cluster(4, 4, Port(1e9, 1e-6), Port(1e8, 1e-5))
    rng = np.random.default_rng(0)
    demand = Demand(rng.poisson(rng.gamma(1, 200, (1, 16)) * np.ones((16, 1))))
    hosts = np.eye(16, dtype=bool) | (rng.random((16, 16)) < 0.1)
    placement = Placement(np.arange(16), hosts)
    assignment = assign(cluster, demand, placement, "even")
    ports, estimated, simulated = (
        simulate_step(cluster, model(layers=2), placement, assignment, network=n)
        for n in ("ports", "estimate", "simulate")
    )
    assert estimated.makespan == pytest.approx(ports.makespan, rel=0.1)
    assert simulated.makespan == pytest.approx(ports.makespan, rel=0.1)
    direct = simulate_step(cluster, model(layers=2), placement, assignment, scheduler="direct")
    assert direct.makespan >= simulated.makespan * 0.98


def test_the_trace_opens_with_one_row_per_rank(tmp_path):
    cluster = flat(2, 1e6)
    placement = ring(2, 1)
    step = simulate_step(
        cluster, model(layers=1), placement, even(2, 10, placement, cluster), network="ports"
    )
    step.to_chrome(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}
    assert {"gather", "experts", "reduce"} <= {e["name"] for e in spans}


def test_bad_input_is_named():
    cluster = flat(2, 1e6)
    placement = domains(2, 1)
    assignment = even(2, 1, placement, cluster)
    with pytest.raises(UnknownName, match="unknown network model 'portz'; did you mean 'ports'"):
        simulate_step(cluster, model(layers=1), placement, assignment, network="portz")
    with pytest.raises(InvalidPlacement, match="2 placements and 1 assignments"):
        simulate_step(cluster, model(layers=1), [placement] * 2, [assignment])
    with pytest.raises(InvalidModel, match="micro_batches must be at least 1, got 0"):
        simulate_step(cluster, model(layers=1), placement, assignment, micro_batches=0)
