"""A replay is what planning each record by hand gives, whoever works it out; and it goes on where it stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from bench import samples
from joblib import Parallel, delayed

import moeyard as my
from moeyard.cost import step_floor
from moeyard.demands import Shape, demand_over_time
from moeyard.errors import MoeyardError
from moeyard.forecast import forecast
from moeyard.formats.replays import load_progress, load_replay, replay_data, save_progress, save_replay
from moeyard.model import STAND_IN
from moeyard.planners.compare import POLICIES
from moeyard.replay import Job, replay
from moeyard.replay.run import BLOCK
from moeyard.workers import calm_interrupts, start, workers

CLUSTER = my.Cluster(2, 2, scale_up=my.Port(1e11, 1e-6), scale_out=my.Port(1e10, 1e-5), name="small")
TRACE = demand_over_time(
    "rotating-hotspot:0.6,period=3", 4, Shape(records=BLOCK + 3, layers=2, experts=8, tokens=8192, top_k=2)
)
CLOCKS = ("plan_s",)


def job(**changes):
    return Job(
        CLUSTER,
        TRACE,
        STAND_IN,
        **(
            {
                "planners": ("static", "quota"),
                "schedulers": ("direct", "auto"),
                "forecast": "last",
                "overlap": False,
            }
            | changes
        ),
    )


@pytest.fixture(scope="module")
def found():
    return replay(job())


def same(a, b):
    """Equal to the bit, clocks apart."""
    assert (a.steps, a.asked) == (b.steps, b.asked)
    assert np.array_equal(a.bound_s, b.bound_s)
    assert np.array_equal(a.error, b.error, equal_nan=True)
    assert {key: rows.tolist() for key, rows in a.rows.items()} == {
        key: rows.tolist() for key, rows in b.rows.items()
    }
    for one, other in zip(a.ways, b.ways, strict=True):
        assert one.name == other.name
        for name in one.figures:
            if name not in CLOCKS:
                assert np.array_equal(one.figures[name], other.figures[name]), (one.name, name)


def by_hand(record, planner, scheduler, method):
    """Place what was known, serve what came, run the step."""
    placements, assignments = [], []
    for layer in range(TRACE.num_layers):
        truth = TRACE.demand(record, layer)
        past = [TRACE.demand(r, layer) for r in range(max(0, record - 8), record)]
        ahead = {"ahead": past[-4:], "oracle": [truth]}.get(method)
        placement = my.place(CLUSTER, truth, "static")
        if ahead:
            placement = my.place(CLUSTER, ahead, planner, model=STAND_IN, home_E=placement.home_E)
        elif past:
            placement = my.place(CLUSTER, forecast(past, "last"), planner, model=STAND_IN)
        placements.append(placement)
        assignments.append(my.assign(CLUSTER, truth, placement, POLICIES[planner], model=STAND_IN))
    return my.simulate_step(
        CLUSTER, STAND_IN, placements, assignments, network="estimate", scheduler=scheduler, overlap=False
    ).makespan


@pytest.mark.parametrize("method", ["last", "oracle", "ahead"])
def test_every_record_is_what_planning_it_by_hand_gives(found, method):
    if method != "last":
        found = replay(job(forecast=method))
    for way in found.ways:
        for record in (
            0,
            1,
            BLOCK,
            BLOCK + 2,
        ):  # quota moves no homes, so nothing depends on the record before
            expected = by_hand(record, way.planner, way.scheduler, method)
            assert way.figures["step_s"][record] == pytest.approx(expected, rel=1e-12), (way.name, record)
    floor = sum(step_floor(CLUSTER, STAND_IN, TRACE.demand(4, layer)) for layer in range(2))
    assert found.bound_s[4] == pytest.approx(floor)
    computed = np.mean([TRACE.counts[4, layer].sum() for layer in range(2)])
    assert found.rows["quota"][4].sum() == pytest.approx(computed)
    assert np.isnan(found.error[0]) == (method != "oracle")


def test_a_forecast_costs_where_the_demand_turns(found):
    oracle = replay(job(forecast="oracle"))
    ours, best = (one.ways[-1].figures["step_s"] for one in (found, oracle))
    turns = np.arange(3, len(TRACE.steps), 3)
    between = np.setdiff1d(np.arange(1, len(TRACE.steps)), turns)
    assert (ours[turns] > 1.2 * best[turns]).all()
    assert (ours[between] < 1.2 * best[between]).all()
    ahead = replay(job(forecast="ahead")).ways[-1].figures["step_s"]
    for known_less in (ours, ahead):
        assert (
            best[between].mean() <= 1.01 * known_less[between].mean()
        )  # who knows the records plans no worse
    assert oracle.first == found.first == 1  # means are of the same records, whoever knows the first
    assert "has no past" in found.left_out
    assert "has no past" not in oracle.left_out
    assert found.error[turns].min() > 3 * found.error[between].max()


def test_processes_change_nothing(found):
    same(found, replay(job(), jobs=2))


def test_a_dask_cluster_changes_nothing(found):
    pytest.importorskip("distributed", reason="no dask: pip install 'moeyard[dask]'")
    same(found, replay(job(), jobs=1, backend="dask"))


def test_a_replay_goes_on_where_it_stopped(found, tmp_path):
    class Stop(Exception):
        pass

    def stop(state):
        save_progress(job(), state, tmp_path)
        raise Stop

    with pytest.raises(Stop):
        replay(job(), watch=stop)
    state = load_progress(job(), tmp_path)
    assert state.done == BLOCK
    same(found, replay(job(), progress=state))
    with pytest.raises(MoeyardError, match="forecast was 'last', now 'ema'"):
        load_progress(job(forecast="ema"), tmp_path)
    assert load_progress(job(), tmp_path / "none") is None


def test_homes_that_move_are_counted_and_carried_on(tmp_path):
    one = replay(job(planners=("balanced",), schedulers=("direct",)))
    moved = one.ways[0].figures["moved_homes"]
    assert moved[0] == 0
    kept = []
    replay(
        job(planners=("balanced",), schedulers=("direct",)),
        watch=lambda state: kept.append(dict(state.previous)),
    )
    homes = [[my.place(CLUSTER, TRACE.demand(0, layer), "static").home_E for layer in range(2)]]
    homes += [[placements[0, layer].home_E for layer in range(2)] for placements in kept]
    assert moved.sum() >= sum((a != b).sum() for a, b in zip(homes[0], homes[-1], strict=True))


def test_what_is_written_is_what_is_read(found, tmp_path):
    save_replay(found, tmp_path)
    same(found, load_replay(tmp_path))
    data = json.loads((tmp_path / "replay.json").read_text())
    assert data["ways"][3]["summary"]["x_bound"] == pytest.approx(found.summary(found.ways[3])["x_bound"])
    assert data["forecast_error"][0] is None
    assert set(data["provenance"]) >= {"step_s", "plan_s", "bound_s"}


def test_records_and_layers_without_rows_cost_nothing_and_spoil_no_figure(found, tmp_path):
    counts = TRACE.counts[:5].copy()
    counts[2], counts[3, 1] = 0, 0
    some = replay(replace(job(), trace=my.Trace(counts)))
    static = some.ways[0]
    assert static.figures["step_s"][2] == some.bound_s[2] == 0
    assert np.isfinite(some.error[1:]).all()
    assert 0 <= some.error[1:].min() <= some.error[1:].max() <= 1
    counted = [1, 3, 4]
    expected = (static.figures["step_s"][counted] / some.bound_s[counted]).mean()
    assert some.summary(static)["x_bound"] == pytest.approx(expected)
    save_replay(some, tmp_path)
    same(some, load_replay(tmp_path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"planners": ("quotta",)}, "did you mean 'quota'"),
        ({"schedulers": ("fats",)}, "did you mean 'fast'"),
        ({"forecast": "lst"}, "did you mean 'last'"),
        ({"network": "port"}, "did you mean 'ports'"),
        ({"planners": ()}, "at least one"),
    ],
)
def test_a_job_that_cannot_be_done_says_why(changes, says):
    with pytest.raises(MoeyardError, match=says):
        job(**changes)
    with pytest.raises(MoeyardError, match="none of loky"):
        replay(job(), backend="spark")


# --- the command


QUICK = ("--planner", "static", "--planner", "quota", "--records", "3", "--layers", "1", "--jobs", "1")


def test_the_command_says_how_it_folded_and_marks_the_best(call, tmp_path):
    status, out, err = call(
        "replay", "h200-2x8", "mixtral-8", "--model", "mixtral-8x7b", *QUICK, "--out", tmp_path / "r"
    )
    assert (status, err.strip()) == (0, "")
    assert "32 ranks on 16: every 2 neighbours are one" in out
    assert out.count("<-") == 1
    assert "the first record has no past" in out
    first = load_replay(tmp_path / "r")
    data = json.loads(
        call(
            "replay",
            "h200-2x8",
            "mixtral-8",
            "--model",
            "mixtral-8x7b",
            *QUICK,
            "--out",
            tmp_path / "r",
            "--resume",
            "--json",
        )[1]
    )
    assert data["ways"][0]["step_s"] == replay_data(first)["ways"][0]["step_s"]


def test_the_command_takes_made_demand_and_scales(call):
    made = ("--experts", "8", "--top-k", "2", "--tokens", "100")
    data = json.loads(call("replay", "lab-2x2", "hot-set:0.5", *QUICK, *made, "--json")[1])
    assert "200 rows per rank and layer" in data["conditions"]["trace"]
    assert data["conditions"]["source"].startswith("made: hot-set (share=0.5")
    data = json.loads(
        call("replay", "lab-2x2", "mixtral-8", *QUICK, "--top-k", "2", "--tokens", "100", "--json")[1]
    )
    assert "200 rows per rank and layer" in data["conditions"]["trace"]


def test_an_interrupted_replay_says_how_to_go_on_and_leaves_no_page_of_another(call, tmp_path, monkeypatch):
    out = tmp_path / "r"
    assert call("replay", "lab-2x2", "mixtral-8", *QUICK, "--out", out)[0] == 0
    status, _, err = call("replay", "lab-2x2", "mixtral-8", *QUICK, "--out", out)
    assert (status, err.count("\n")) == (2, 1)
    assert "--resume" in err
    (out / "replay.json").unlink()
    (out / "replay.npz").unlink()

    def stop(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr("moeyard.replay.run.BLOCK", 1)
    with monkeypatch.context() as patch:
        patch.setattr("moeyard.cli.replay.save_progress", lambda *args: (save_progress(*args), stop()))
        status, _, err = call("replay", "lab-2x2", "mixtral-8", *QUICK, "--out", out)
    assert status == 130
    assert f"0 of 3 records are in {out}; the same command with --resume goes on" in err
    with pytest.raises(MoeyardError, match=r"r: a replay that is not finished; .* --resume"):
        load_replay(out)
    (out / "replay.json").write_text("{}")  # of what was here before
    with monkeypatch.context() as patch:
        patch.setattr("moeyard.cli.replay.make_replay", stop)
        assert "1 of 3 records" in call("replay", "lab-2x2", "mixtral-8", *QUICK, "--out", out, "--resume")[2]
    assert not (out / "replay.json").exists()
    assert call("replay", "lab-2x2", "mixtral-8", *QUICK, "--out", out, "--resume")[0] == 0
    assert load_replay(out).steps


@pytest.mark.parametrize(
    ("error", "heard"),
    [(ValueError("Queue <Queue> is closed"), False), (ValueError("of another kind"), True)],
)
def test_the_thread_that_hands_out_work_is_hushed_where_its_queue_is_closed_before_the_interrupt_is_here(
    error, heard, monkeypatch
):
    """joblib hears the interrupt first and ends the processes, and only then hands it on."""

    def fail():
        raise error

    said = []
    before = said.append
    monkeypatch.setattr(threading, "excepthook", before)
    with workers("loky", 1):
        thread = threading.Thread(target=fail, name="ExecutorManagerThread")
        thread.start()
        thread.join()
    assert [one.exc_value for one in said] == [error] * heard
    assert threading.excepthook is before


def test_after_an_interrupt_joblibs_thread_is_not_heard_whatever_it_misses(monkeypatch):
    """Its work or its processes may be gone: the traceback of another kind that it would print is no error of anybody's. Of a thread that
    is started later it is."""
    ended, said = threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", said.append)

    def fail():
        ended.wait()
        raise KeyError(7)

    def start(name):
        thread = threading.Thread(target=fail, name=name)
        thread.start()
        return thread

    with workers("loky", 1):
        before = [start("ExecutorManagerThread"), start("of the caller")]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        ended.set()
        later = start("ExecutorManagerThread")
        for thread in (*before, later):
            thread.join()
    assert {one.thread for one in said} == {before[1], later}


def test_ctrl_c_leaves_no_lock_half_taken():
    """Python takes a Condition in steps, and an interrupt between two of them leaves it taken: joblib then waits for ever."""
    condition, main = threading.Condition(threading.Lock()), threading.get_ident()

    def take(sent):
        sent.start()
        while True:
            with condition:
                pass
            sum(range(100))

    for turn in range(60):
        sent = threading.Timer(0.001 + 1e-5 * turn, signal.pthread_kill, [main, signal.SIGINT])
        with calm_interrupts(), pytest.raises(KeyboardInterrupt):
            take(sent)
        assert condition.acquire(blocking=False), turn
        condition.release()


def test_ctrl_c_is_one_line_of_the_command_and_none_of_its_workers(root, tmp_path):
    """As a terminal sends it: to all processes."""
    command = ["replay", "lab-2x2", "hot-set", "--records", "4000", "--layers", "2", "--planner", "quota", "--jobs", "2"]  # fmt: skip
    started = subprocess.Popen(
        [sys.executable, "-m", "moeyard", *command, "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while started.poll() is None and not (tmp_path / "replay.npz").exists():
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGINT)
    said = [line for line in started.communicate(timeout=60)[1].splitlines() if line.strip()]
    assert started.returncode == 130, said
    assert [line for line in said if " s to go" not in line] == [said[-1]], said
    kept = int(
        re.fullmatch(r"moeyard: interrupted: (\d+) of 4000 records are in .* --resume goes on", said[-1])[1]
    )
    with np.load(tmp_path / "replay.npz") as saved:
        assert len(saved["steps"]) - kept in (0, BLOCK)  # told, or written a moment before it could be told


def test_workers_are_deaf_to_ctrl_c_from_their_start_and_this_process_is_not():
    before = signal.getsignal(signal.SIGINT)
    start(2)
    found = Parallel(n_jobs=2)(delayed(signal.getsignal)(signal.SIGINT) for _ in range(4))
    assert found == 4 * [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) == before != signal.SIG_IGN


def test_the_trace_says_how_many_choices_a_token_has_not_the_model(call):
    asked = ("replay", "lab-2x2", "mixtral-8", "--model", "deepseek-v3", *QUICK, "--tokens", "100", "--json")
    said = json.loads(call(*asked)[1])["conditions"]
    assert "200 rows per rank and layer" in said["trace"]
    assert said["choices"] == "2 a token, by mixtral-8; not --model deepseek-v3: 8"
    said = json.loads(call(*asked, "--top-k", "3")[1])["conditions"]
    assert said["choices"] == "3 a token, by --top-k; not mixtral-8: 2, --model deepseek-v3: 8"
    assert (
        "choices" not in json.loads(call("replay", "lab-2x2", "mixtral-8", *QUICK, "--json")[1])["conditions"]
    )


def test_a_dense_model_is_refused_by_the_name_of_its_file(call, tmp_path):
    dense = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "dense.json").write_text(json.dumps(dense))
    for trace in ("mixtral-8", "balanced"):
        status, out, err = call("replay", "lab-2x2", trace, "--model", tmp_path / "dense.json")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "dense.json: dict has none of num_local_experts" in err


@pytest.mark.parametrize("kept", [[], [0]])
def test_a_trace_without_rows_is_refused(call, tmp_path, kept):
    counts = np.zeros((3, 1, 4, 8), np.int64)
    counts[kept] = 5
    my.save_trace(my.Trace(counts), tmp_path / "none.npz")
    for command in ("replay", "advise"):
        status, out, err = call(command, "lab-2x2", tmp_path / "none.npz", "--jobs", "1")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "none.npz: no rows in 3 records and 1 layers" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ("lab-2x2", "mixtral-8", "--top-k", "9"),
            "--top-k: top_k is 9: a token chooses at least 1 of these 8",
        ),
        (("h200-2x8", "mixtrl-8"), "did you mean 'mixtral-8'"),
        (("h200-2x8", "mixtral-8", "--resume"), "--out"),
        (("h200-2x8", "none.jsonl"), "none.jsonl"),
        (("h200-2x8", "mixtral-8", "--experts", "4"), "recorded"),
        (("h200-2x8", str(samples.FOLDER / "loads.npy"), "--tokens", "5"), "--top-k"),
        (("h200-2x8", "hot-set:2"), "from 0 to 1"),
    ],
)
def test_bad_input_is_one_line(call, args, says):
    status, out, err = call("replay", *args)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err
