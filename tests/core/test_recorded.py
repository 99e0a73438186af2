"""Routing that others recorded: every form gives the counts it holds, hostile ones one line; folding keeps every expert's rows."""

import io
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
from bench import samples
from hypothesis import given
from hypothesis import strategies as st

import moeyard as my
from moeyard.cli.routing import Wanted, read_case
from moeyard.demands import DEMANDS, Shape, demand_over_time
from moeyard.errors import InvalidFile, MoeyardError
from moeyard.fold import fold
from moeyard.formats.traces import find_trace

FORMS = {  # file -> what of samples.counts() it holds
    "megatron.jsonl": lambda rows: rows,
    "table.csv": lambda rows: rows,
    "sglang.pt": lambda rows: rows.sum(axis=2, keepdims=True),
    "loads.npy": lambda rows: rows.sum(axis=2, keepdims=True),
    "loads.json": lambda rows: rows.sum(axis=2, keepdims=True)[:1],
    "loads.csv": lambda rows: rows.sum(axis=2, keepdims=True)[:1],
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_counts_it_holds(name):
    trace = find_trace(str(samples.FOLDER / name))
    assert np.array_equal(trace.counts, FORMS[name](samples.counts()))
    assert trace.meta["source"]
    if name in ("megatron.jsonl", "table.csv"):
        assert trace.steps.tolist() == list(samples.STEPS)


def test_the_samples_are_what_the_script_writes(tmp_path):
    pytest.importorskip("torch")
    samples.write(tmp_path)
    for name in FORMS:
        assert np.array_equal(
            find_trace(str(tmp_path / name)).counts, find_trace(str(samples.FOLDER / name)).counts
        )
        if name != "sglang.pt":  # torch writes its own version into it
            assert (tmp_path / name).read_bytes() == (samples.FOLDER / name).read_bytes()


# --- lines of Megatron's router


def line(**changes):
    return {"step": 1, "layer": 0, "rank": 0, "topk": 2, "top_indices": [[0, 1], [1, 2]]} | changes


def written(tmp_path, *lines):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


def test_micro_batches_add_up_and_dropped_rows_do_not_count(tmp_path):
    flat = line(top_indices=[3, 0, -1, -1])
    trace = find_trace(written(tmp_path, line(), flat, line(layer=4, top_indices=[])))
    assert trace.counts.tolist() == [[[[2, 2, 1, 1]], [[0, 0, 0, 0]]]]
    assert trace.meta["layers"] == [0, 4]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line(rank=1)], "no line of rank 0"),
        ([line(), line(layer=1), line(step=2)], "step 2, layer 1 has no line of rank 0"),
        ([line(top_indices=[[0, 1, 2]])], "topk = 2"),
        ([line(top_indices=[[0], [1, 2]])], "topk = 2"),
        ([line(top_indices=[0.5, 1])], "topk = 2"),
        ([line(top_indices=[-2, 1])], "topk = 2"),
        ([line(top_indices=[2**70, 1])], "topk = 2"),
        ([line(top_indices=[10**6, 1])], "experts"),
        ([line(num_experts=4, top_indices=[[0, 9]])], "r.jsonl:1: expert 9 is chosen of num_experts 4"),
        (
            [line(num_experts=4), line(rank=1, top_indices=[[0, 9]])],
            "r.jsonl:2: expert 9 is chosen, line 1 says num_experts 4",
        ),
        ([line(step=-1)], "step must be"),
        ([line(rank=True)], "rank must be"),
        ([{"step": 1}], "missing key 'layer'"),
        ([[1]], "must be an object"),
        ([], "empty"),
    ],
)
def test_bad_lines_get_one_line(tmp_path, lines, says):
    with pytest.raises(InvalidFile, match=says) as error:
        find_trace(written(tmp_path, *lines))
    assert "\n" not in str(error.value)
    assert "r.jsonl" in str(error.value)


# --- files of torch.save


def archive(path, program, **members):
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a/data.pkl", program)
        for name, content in members.items():
            made.writestr(f"a/data/{name.removeprefix('n')}", content)
    return str(path)


class Trap:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_in_a_file_is_run(tmp_path, protocol):
    made = tmp_path / "made"
    for trap in (Trap(os.mkdir, str(made)), Trap(eval, f"__import__('os').mkdir({str(made)!r})")):
        path = archive(tmp_path / "t.pt", pickle.dumps({"logical_count": trap}, protocol=protocol))
        with pytest.raises(InvalidFile, match="not called"):
            find_trace(path)
    assert not made.exists()


def tensor_program(size, stride, numbers, offset=0):
    """A pickle such as torch writes, by hand."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, one):
            return one.pid if isinstance(one, Storage) else None

    class Storage:
        def __init__(self):
            import torch

            self.pid = ("storage", torch.LongStorage, "0", "cpu", numbers)

    import torch

    class Rebuilt:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, None)

    out = io.BytesIO()
    Pickler(out, protocol=2).dump({"logical_count": Rebuilt()})
    return out.getvalue()


@pytest.mark.parametrize(
    ("size", "stride", "numbers", "offset"),
    [
        ((2, 3), (3, 1), 5, 0),
        ((10**9, 10**9), (0, 0), 6, 0),
        ((2, 3), (3, 1), 6, 1),
        ((2, 3), (-3, 1), 6, 3),
        ((2, 3), (3,), 6, 0),
        ((2, 3), (3, 1), 7, 0),
    ],
)
def test_a_tensor_that_reaches_beyond_its_numbers_is_refused(tmp_path, size, stride, numbers, offset):
    pytest.importorskip("torch")
    program = tensor_program(size, stride, numbers, offset)
    with pytest.raises(InvalidFile, match="a tensor"):
        find_trace(archive(tmp_path / "t.pt", program, n0=np.arange(6).tobytes()))


def test_tensors_with_strides_come_as_torch_sees_them(tmp_path):
    torch = pytest.importorskip("torch")
    whole = torch.arange(60, dtype=torch.int64).reshape(5, 3, 4)
    torch.save({"logical_count": whole[1:, :, ::2], "other": [whole.half(), 1.5, None]}, tmp_path / "t.pt")
    found = find_trace(str(tmp_path / "t.pt")).counts[:, :, 0]
    assert np.array_equal(found, whole[1:, :, ::2].numpy())


def test_shares_become_rows(tmp_path):
    np.save(tmp_path / "l.npy", np.array([[0.25, 0.75], [0.5, 0.5]]))
    trace = find_trace(str(tmp_path / "l.npy"))
    assert trace.counts[0, :, 0].tolist() == [[1 << 18, 3 << 18], [1 << 19, 1 << 19]]
    assert "shares" in trace.meta


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("l.json", "[[1, 2], [3]]", "equally long"),
        ("l.json", '{"x": 1}', "loads"),
        ("l.json", "[" * 9000, "too deep|not JSON"),
        ("l.json", "[[1, -1]]", "record 0, layer 0, expert 1: load -1; .* zero or more"),
        ("l.json", "[[[1, 2], [NaN, 1]]]", "record 0, layer 1, expert 0: load nan"),
        ("t.csv", "layer,rows\n0,1\n", "no column expert, only 'layer', 'rows'"),
        ("l.csv", "1,2\n3\n", "line 2"),
        ("t.csv", "expert,rows\n0,1\n1,-4\n", "line 3"),
        ("t.csv", "expert,rows\n0,1,2\n", "line 2 has 3 values"),
        ("t.csv", "expert,rwos\n0,1\n", "rwos"),
        ("t.csv", "rank,expert,rows\n900000,0,1\n0,900000,1\n", "without gaps"),
        ("t.csv", "expert,rows\n", "no counts"),
        ("t.txt", "1", "unknown kind of file"),
    ],
)
def test_bad_loads_and_tables_get_one_line(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidFile, match=says) as error:
        find_trace(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("mine", (2, 8), "'mine', the only array, for loads[layer, expert], by its shape (2, 8)"),
        (
            "mine",
            (3, 2, 4, 8),
            "'mine', the only array, for counts[record, layer, rank, expert], by its shape",
        ),
        ("loads", (2, 8), None),
        ("counts", (3, 2, 4, 8), None),
    ],
)
def test_an_array_of_another_name_is_said_to_be_taken(tmp_path, name, shape, says):
    np.savez(tmp_path / "x.npz", **{name: np.ones(shape, dtype=np.int64)})
    case = read_case("lab-2x2", str(tmp_path / "x.npz"), Wanted())
    assert case.conditions.get("taken", "").startswith(says or "")
    assert ("taken" in case.conditions) == (says is not None)


def test_more_rows_than_can_be_counted_name_the_file(tmp_path):
    np.savez(tmp_path / "huge.npz", counts=np.full((2, 1, 2, 4), 2**61))
    with pytest.raises(MoeyardError, match=r"huge.npz: trace counts\[0, 0\] hold .* below 2\*\*62"):
        find_trace(str(tmp_path / "huge.npz"))


# --- folding


def slow_fold(rows_R, ranks, shift):
    """One expert's rows, by cutting a line of single rows: the fraction of each at a cut goes down."""
    upto = []
    for c in range(ranks + 1):
        at, part = divmod(c * len(rows_R), ranks)
        whole = sum(int(n) for n in rows_R[:at]) * ranks + (int(rows_R[at]) * part if part else 0)
        upto.append((whole + shift) // ranks)
    return np.diff(upto)


@given(
    rows=st.lists(st.lists(st.integers(0, 1 << 50), min_size=3, max_size=3), min_size=1, max_size=7),
    ranks=st.integers(1, 12),
)
def test_folding_keeps_every_experts_rows_and_cuts_where_it_says(rows, ranks):
    counts = np.array(rows)[None, None]
    folded = fold(my.Trace(counts), ranks)
    assert folded.num_ranks == ranks
    assert np.array_equal(folded.counts.sum(axis=2), counts.sum(axis=2))
    if len(rows) == ranks:
        assert np.array_equal(folded.counts, counts)
        return
    for e in range(3):
        shifts = [slow_fold(counts[0, 0, :, e], ranks, shift).tolist() for shift in range(ranks)]
        assert folded.counts[0, 0, :, e].tolist() in shifts


def test_folding_says_what_it_did_and_scales():
    trace = my.load_trace("mixtral-8")
    half = fold(trace, 16)
    assert np.array_equal(half.counts, trace.counts.astype(np.int64).reshape(23, 8, 16, 2, 8).sum(axis=3))
    assert half.meta["folded"] == "32 ranks on 16: every 2 neighbours are one"
    assert "divided by 2" in fold(trace, 64).meta["folded"]
    assert "side by side" in fold(trace, 12).meta["folded"]
    assert fold(trace, 32) is trace
    more = fold(trace, 32, rows_per_rank=16384)
    assert more.counts.sum(axis=(2, 3)).mean() == pytest.approx(16384 * 32, rel=1e-3)
    assert "16384 rows per rank" in more.meta["folded"]
    spread = fold(find_trace(str(samples.FOLDER / "loads.npy")), 4)
    assert np.ptp(spread.counts.sum(axis=3)) <= 2
    for bad in (0.0, np.inf, -1.0):
        with pytest.raises(MoeyardError):
            fold(trace, 32, rows_per_rank=bad)


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_scaling_keeps_every_ranks_total_and_no_expert_in_particular_loses(rows):
    trace = my.load_trace("olmoe-64")
    part = my.Trace(trace.counts[:2, :2])
    found = fold(part, 32, rows_per_rank=rows).counts
    assert (found.sum(axis=3) == rows).all()
    exact = part.counts * (rows / part.counts.sum(axis=3, keepdims=True))
    assert np.abs(found - exact).max() < 1
    even = fold(my.Trace(np.full((1, 1, 32, 64), 100)), 32, rows_per_rank=8).counts
    assert np.ptp(even.sum(axis=2)) <= 3


def test_scaling_shares_out_what_ranks_do_not_have_whole():
    uneven = my.Trace(np.array([[[[10, 0], [2, 2], [3, 3], [0, 0]]]]))
    found = fold(uneven, 4, rows_per_rank=1).counts[0, 0]
    assert found.sum() == 4
    assert np.abs(found.sum(axis=1) - np.array([2, 0.8, 1.2, 0])).max() < 1


# --- demand over time

SMALL = Shape(records=12, layers=2, experts=16, tokens=512, top_k=2)


@pytest.mark.parametrize("name", DEMANDS)
def test_demand_over_time_has_its_tokens_and_its_seed(name):
    trace = demand_over_time(name, 8, SMALL)
    again = demand_over_time(name, 8, SMALL)
    assert np.array_equal(trace.counts, again.counts)
    other = demand_over_time(name, 8, Shape(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, "seed": 1}))
    assert not np.array_equal(trace.counts, other.counts)
    assert trace.counts.shape == (12, 2, 8, 16)
    sent = trace.counts.sum(axis=3)
    assert (trace.counts.max(axis=3) <= sent / 2).all()  # no expert twice for a token
    if name not in ("ragged-source", "zero-load-rank"):
        assert (sent == 1024).all()


def shares(spec, shape=SMALL):
    counts = demand_over_time(spec, 8, shape).counts
    return counts, counts.sum(axis=2) / counts.sum(axis=(2, 3), keepdims=True)[:, :, 0]


def test_each_demand_is_what_its_name_says():
    _, share = shares("balanced")
    assert share.max() < 1.3 / 16
    _, share = shares("hot-set:0.6,experts=3")
    top = np.sort(share, axis=2)[:, :, -3:].sum(axis=2)
    assert np.allclose(top, 0.6, atol=0.03)
    assert all(len({tuple(np.sort(np.argsort(-s)[:3])) for s in share[:, m]}) == 1 for m in range(2))
    _, share = shares("hot-rank:0.5")
    own = share.reshape(12, 2, 8, 2).sum(axis=3)
    assert np.allclose(own.max(axis=2), 0.5, atol=0.03)
    _, share = shares("spread:1")
    wanted = 1 / np.arange(1, 17)
    assert np.allclose(np.sort(share)[..., ::-1].mean(axis=(0, 1)), wanted / wanted.sum(), atol=0.02)
    counts, share = shares("ragged-source:0.5")
    sent = counts.sum(axis=3)[0, 0]
    assert sent[0] == 512
    assert sent[-1] == 1536
    counts, share = shares("zero-load-rank:2")
    assert counts[:, :, -2:].sum() == 0
    assert counts[..., -4:].sum() == 0  # the experts at home on the idle ranks
    assert (counts[:, :, :6].sum(axis=3) > 0).all()
    _, share = shares("rotating-hotspot:period=4")
    hot = [tuple(np.sort(np.argsort(-s)[:2])) for s in share[:, 0]]
    assert [len(set(hot[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(hot)) == 3
    _, share = shares("burst:period=4,length=1")
    assert [bool(s.max() > 0.2) for s in share[:, 0]] == [False, False, False, True] * 3


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hotset", "did you mean 'hot-set'"),
        ("hot-set:2", "from 0 to 1"),
        ("hot-set:x", "must be a number"),
        ("hot-set:width=2", "has the parameters: share=0.5, experts=0"),
        ("balanced:1", "parameters: none"),
    ],
)
def test_a_demand_that_cannot_be_read_says_what_can(spec, says):
    with pytest.raises(MoeyardError, match=says):
        demand_over_time(spec, 4)


def test_a_shape_that_cannot_be_made_is_refused():
    for wrong in ({"records": 0}, {"top_k": 65}, {"seed": -1}):
        with pytest.raises(MoeyardError):
            Shape(**wrong)


@pytest.mark.parametrize(("ranks", "share"), [(4, 0.9), (8, 0.5), (16, 0.25), (64, 0.125)])
def test_a_hot_rank_is_hot_on_any_number_of_ranks(ranks, share):
    counts = demand_over_time("hot-rank", ranks, Shape(2, 1, 64, 4096, 1)).counts
    at_home = counts.sum(axis=2).reshape(2, 1, ranks, -1).sum(axis=3)
    assert at_home.max(axis=2) / at_home.sum(axis=2) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("zero-load-rank:4", "of 4 ranks at least one must have rows"),
        ("zero-load-rank:1.5", "ranks must be a whole number, got '1.5'"),
        ("burst:length=9", "a burst of 9 records does not fit into every 8"),
    ],
)
def test_demands_that_cannot_be_are_refused(spec, says):
    with pytest.raises(my.MoeyardError, match=says):
        demand_over_time(spec, 4, SMALL)


def test_tokens_of_a_made_trace_are_those_of_the_ranks_that_have_some():
    case = read_case(
        "lab-2x2", "zero-load-rank", Wanted(tokens=512, records=2, layers=1, experts=16, top_k=2)
    )
    assert case.trace.counts.sum(axis=3).tolist() == [[[1024, 1024, 1024, 0]]] * 2
