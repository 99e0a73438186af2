"""Files that round-trip, and bad ones that get one line with the place, the values and the fix."""

import json
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard.cluster import Cluster, Contention, Port
from moeyard.demand import Demand
from moeyard.errors import (
    InvalidCluster,
    InvalidDemand,
    InvalidFile,
    InvalidTraffic,
    MoeyardError,
    UnknownName,
)
from moeyard.formats import (
    ROW_BYTES,
    load_cluster,
    load_demand,
    load_trace,
    load_traffic,
    preset_names,
    read_cluster_file,
    save_cluster,
    save_demand,
    save_trace,
    save_traffic,
)
from moeyard.trace import Trace
from moeyard.traffic import Traffic

HEAD = "nodes = 2\nranks_per_node = 4\n"
PORTS = """
[scale_up]
bandwidth = "380 GB/s"
latency = "10 us"

[scale_out]
bandwidth = "400 Gbit/s"
latency = 1e-5
"""


def same(a, b):
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Cluster))


def message(error):
    """The text of a caught error, which must be one line."""
    text = str(error.value)
    assert "\n" not in text
    return text


# --- clusters


@st.composite
def clusters(draw):
    datacenters = draw(st.integers(1, 2))
    nodes, ranks = datacenters * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    nics = draw(st.integers(1, ranks))
    positive = st.floats(1e-3, 1e12)
    port = st.builds(Port, positive, st.floats(0, 1))
    factors = st.sampled_from([0.0, 0.25, 1.0, 1.0, 1.0])
    return Cluster(
        nodes=nodes,
        ranks_per_node=ranks,
        scale_up=draw(port),
        scale_out=draw(port),
        nics_per_node=nics,
        datacenters=datacenters,
        wan=draw(port) if datacenters > 1 else draw(st.none() | port),
        rails=draw(st.lists(st.lists(factors, min_size=nics, max_size=nics), min_size=nodes, max_size=nodes)),
        speed=draw(
            st.lists(st.sampled_from([1.0, 1.0, 0.7]), min_size=nodes * ranks, max_size=nodes * ranks)
        ),
        contention=draw(
            st.builds(Contention, st.floats(0, 1), st.integers(0, 9), st.floats(1, 9) | st.just(np.inf))
        ),
        name=draw(st.text(st.characters(codec="utf-8"), min_size=1)),
    )


@given(clusters())
def test_a_cluster_survives_its_file(tmp_path_factory, cluster):
    path = tmp_path_factory.mktemp("clusters") / "c.toml"
    save_cluster(cluster, path, description='it is "so"')
    loaded, description = read_cluster_file(path)
    assert same(loaded, cluster)
    assert description == 'it is "so"'


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_what_it_is(name):
    cluster, description = read_cluster_file(name)
    assert cluster.name == name
    assert len(description) > 10


def test_presets_of_the_published_systems():
    h200 = Cluster.load("h200-4x8")
    assert (h200.nodes, h200.ranks_per_node, h200.nics_per_node) == (4, 8, 8)
    assert h200.scale_up == Port(380e9, 1e-5)
    assert h200.scale_out == Port(48.85e9, 1e-5)
    assert Cluster.load("h200-2x8").nodes == 2
    assert Cluster.load("mi300x-4x8").scale_out.bandwidth == 11e9
    assert Cluster.load("dgx-h100-16x8").num_ranks == 128
    assert Cluster.load("dgx-h100-128x8").num_ranks == 1024
    loaded = [Cluster.load(name) for name in preset_names()]
    assert any(c.datacenters == 2 and c.wan for c in loaded)
    assert any(c.nics_per_node == 4 and c.ranks_per_node == 8 for c in loaded)


def test_a_file_takes_its_name_from_its_path_unless_it_has_one(tmp_path):
    path = tmp_path / "yard.toml"
    path.write_text(HEAD + PORTS)
    assert load_cluster(path).name == "yard"
    path.write_text('name = "own"\n' + HEAD + PORTS)
    assert load_cluster(path).name == "own"


def test_rails_and_speed_as_exceptions_or_in_full(tmp_path):
    path = tmp_path / "c.toml"
    some = "rails = [{ node = 1, rail = 2, factor = 0.5 }]\nspeed = [{ rank = 7, factor = 2 }]\n"
    path.write_text(HEAD + some + PORTS)
    sparse = load_cluster(path)
    full = "rails = [[1, 1, 1, 1], [1, 1, 0.5, 1]]\nspeed = [1, 1, 1, 1, 1, 1, 1, 2]\n"
    path.write_text(HEAD + full + PORTS)
    assert same(load_cluster(path), sparse)
    assert sparse.rails[1, 2] == 0.5
    assert sparse.speed[7] == 2


BAD_CLUSTERS = {
    "misspelt key": (HEAD + PORTS.replace("bandwidth", "bandwith", 1), ["[scale_up]", "'bandwith'", "did you mean 'bandwidth'?"]),
    "misspelt top key": (HEAD.replace("nodes", "node", 1) + PORTS, ["'node'", "did you mean 'nodes'?"]),
    "misspelt table": (HEAD + PORTS + "[contentoin]\nloss = 1\n", ["'contentoin'", "did you mean 'contention'?"]),
    "missing table": (HEAD, ["'scale_up'", "missing"]),
    "missing key": (HEAD + PORTS.replace("latency = 1e-5", ""), ["[scale_out]", "'latency'", "missing"]),
    "unit": (HEAD + PORTS.replace("GB/s", "GBps"), ["[scale_up]", "bandwidth", "'380 GBps'", "such as"]),
    "kind of unit": (HEAD + PORTS.replace('"10 us"', '"10 GB/s"'), ["[scale_up]", "latency", "such as"]),
    "truth for a rate": (HEAD + PORTS.replace('"380 GB/s"', "true"), ["[scale_up]", "bandwidth", "True"]),
    "nan rate": (HEAD + PORTS.replace('"380 GB/s"', "nan"), ["[scale_up]", "nan"]),
    "negative rate": (HEAD + PORTS.replace('"380 GB/s"', "-1"), ["[scale_up]", "-1"]),
    "infinite latency": (HEAD + PORTS.replace("1e-5", "inf"), ["[scale_out]", "inf"]),
    "text for a number": (HEAD.replace("2", '"2"') + PORTS, ["nodes", "whole number", "'2'"]),
    "half a node": (HEAD.replace("2", "2.5") + PORTS, ["nodes", "whole number", "2.5"]),
    "no nodes": (HEAD.replace("2", "0") + PORTS, ["nodes", "0"]),
    "number for a table": (HEAD + "wan = 3\n" + PORTS, ["wan", "table", "3"]),
    "number for a list": (HEAD + "rails = 3\n" + PORTS, ["rails", "list", "3"]),
    "ragged rails": (HEAD + "rails = [[1, 1, 1, 1], [1]]\n" + PORTS, ["rails[1]", "1", "give 4"]),
    "few rails": (HEAD + "rails = [[1, 1, 1, 1]]\n" + PORTS, ["rails", "1", "give 2"]),
    "negative rail": (HEAD + "rails = [[1, 1, 1, 1], [1, 1, 1, -1]]\n" + PORTS, ["rails[1, 3]", "-1"]),
    "text in rails": (HEAD + 'rails = [[1, 1, 1, 1], [1, 1, 1, "x"]]\n' + PORTS, ["[rails][1]", "'x'"]),
    "no such rail": (HEAD + "rails = [{ node = 1, rail = 4, factor = 0 }]\n" + PORTS, ["rails[0]", "rail 4", "0..3"]),
    "rail twice": (HEAD + "rails = [{ node = 1, rail = 1, factor = 0 }, { node = 1, rail = 1, factor = 1 }]\n" + PORTS, ["rails[1]", "twice"]),
    "misspelt rail": (HEAD + "rails = [{ nod = 1, rail = 1, factor = 0 }]\n" + PORTS, ["[rails][0]", "'nod'", "did you mean 'node'?"]),
    "few speeds": (HEAD + "speed = [1, 2]\n" + PORTS, ["speed", "2", "give 8"]),
    "no speed": (HEAD + "speed = [{ rank = 3, factor = 0 }]\n" + PORTS, ["speed[3]", "positive"]),
    "many nics": (HEAD + "nics_per_node = 5\n" + PORTS, ["nics_per_node", "5", "4 ranks"]),
    "odd datacenters": (HEAD + "datacenters = 3\n" + PORTS, ["2 nodes", "3 datacenters"]),
    "no wan": (HEAD + "datacenters = 2\n" + PORTS, ["2 datacenters", "wan"]),
    "negative loss": (HEAD + PORTS + "[contention]\nloss = -1\n", ["loss", "-1"]),
    "not TOML": ("nodes =", ["not TOML"]),
    "not text": (b"\xff\xfe\x00", ["not TOML"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CLUSTERS)
def test_a_bad_cluster_file_gets_one_line_naming_file_place_and_value(tmp_path, case):
    content, expected = BAD_CLUSTERS[case]
    path = tmp_path / "c.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((InvalidCluster, InvalidFile)) as error:
        load_cluster(path)
    text = message(error)
    assert text.startswith(f"{path}: ")
    for part in expected:
        assert part in text


def test_the_line_of_the_style_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(HEAD + PORTS.replace('bandwidth = "400', 'bandwith = "400'))
    with pytest.raises(InvalidFile) as error:
        load_cluster("c.toml")
    assert message(error) == "c.toml: [scale_out]: unknown key 'bandwith'; did you mean 'bandwidth'?"


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(UnknownName) as error:
        load_cluster("h200-4x9")
    assert "'h200-4x9'; did you mean 'h200-4x8'?" in message(error)
    with pytest.raises(FileNotFoundError):
        load_cluster("no-such-file.toml")


# --- arrays


def counts(shape):
    return np.arange(np.prod(shape)).reshape(shape)


@pytest.mark.parametrize("suffix", ["npy", "npz", "csv"])
def test_traffic_and_demand_survive_their_files(tmp_path, suffix):
    traffic, demand = Traffic(counts((3, 3)), 4096), Demand(counts((3, 5)))
    save_traffic(traffic, tmp_path / f"t.{suffix}")
    save_demand(demand, tmp_path / f"d.{suffix}")
    loaded = load_traffic(tmp_path / f"t.{suffix}")
    assert np.array_equal(loaded.rows, traffic.rows)
    assert loaded.row_bytes == (4096 if suffix == "npz" else ROW_BYTES)
    assert load_traffic(tmp_path / f"t.{suffix}", row_bytes=10).row_bytes == 10
    assert np.array_equal(load_demand(tmp_path / f"d.{suffix}").rows, demand.rows)


def test_the_only_array_of_an_npz_needs_no_name(tmp_path):
    np.savez(tmp_path / "t.npz", whatever=counts((2, 2)), row_bytes=16)
    assert load_traffic(tmp_path / "t.npz").row_bytes == 16


def test_csv_may_have_comments_floats_and_empty_lines(tmp_path):
    (tmp_path / "t.csv").write_text("# src by dst\n0,1\n\n2.0, 3\n")
    assert load_traffic(tmp_path / "t.csv").rows.tolist() == [[0, 1], [2, 3]]


BAD_ARRAYS = {
    "not square": (counts((2, 3)), ["square", "(2, 3)"]),
    "one axis": (counts(4), ["matrix", "(4,)"]),
    "three axes": (counts((2, 2, 2)), ["matrix", "(2, 2, 2)"]),
    "empty": (np.zeros((0, 0)), ["matrix", "(0, 0)"]),
    "negative": (np.array([[0, 1], [-3, 0]]), ["[1, 0]", "-3", "zero or more"]),
    "nan": (np.array([[0, np.nan], [0, 0]]), ["[0, 1]", "nan", "finite"]),
    "inf": (np.array([[0, np.inf], [0, 0]]), ["[0, 1]", "inf", "finite"]),
    "half a row": (np.array([[0, 0.5], [0, 0]]), ["[0, 1]", "0.5", "whole"]),
    "huge": (np.array([[0, 1e30], [0, 0]]), ["[0, 1]", "1e+30", "2**62"]),
    "text": (np.array([["a", "b"], ["c", "d"]]), ["whole numbers", "dtype"]),
    "complex": (np.array([[1j]]), ["whole numbers", "complex"]),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_bad_matrix_gets_one_line_naming_file_place_and_value(tmp_path, case):
    array, expected = BAD_ARRAYS[case]
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(InvalidTraffic) as error:
        load_traffic(tmp_path / "t.npy")
    text = message(error)
    assert text.startswith(f"{tmp_path / 't.npy'}: ")
    for part in expected:
        assert part in text
    if case != "not square":
        with pytest.raises(InvalidDemand):
            load_demand(tmp_path / "t.npy")


BAD_FILES = {
    "t.csv": [
        ("", ["empty"]),
        ("1,2\n3\n", ["line 2", "1 values", "line 1 has 2"]),
        ("1,2\n3,x\n", ["line 2, column 2", "'x'"]),
        ("1,nan\n3,4\n", ["[0, 1]", "nan"]),
        ("1,2\n3,-4\n", ["[1, 1]", "-4"]),
        ("1,2\n3,99999999999999999999\n", ["[1, 1]", "1e+20", "2**62"]),
    ],
    "t.npy": [
        (b"\x93NUMPY\x01", ["cannot be read"]),
        (b"garbage", ["cannot be read"]),
        (b"", ["cannot be read"]),
    ],
    "t.npz": [(b"PK\x03\x04garbage", ["cannot be read"])],
    "t.txt": [("1", ["'.txt'", ".npy, .npz or .csv"])],
}


@pytest.mark.parametrize(
    ("name", "content", "expected"), [(name, *case) for name, cases in BAD_FILES.items() for case in cases]
)
def test_a_damaged_file_gets_one_line(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(MoeyardError) as error:
        load_traffic(path)
    text = message(error)
    assert text.startswith(f"{path}: ")
    for part in expected:
        assert part in text


def test_an_npz_must_say_which_array_and_which_row_bytes(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, a=counts((2, 2)), b=counts((2, 2)))
    with pytest.raises(InvalidFile, match=r"arrays a, b; name the one to use 'rows'"):
        load_traffic(path)
    np.savez(path, rows=counts((2, 2)), row_bytes=[1, 2])
    with pytest.raises(InvalidFile, match=r"row_bytes must be one whole number"):
        load_traffic(path)
    np.savez(path, rows=counts((2, 2)), row_bytes=0)
    with pytest.raises(
        InvalidTraffic, match=r"row_bytes must be a whole number of at least 1 and at most 2\*\*40, got 0"
    ):
        load_traffic(path)
    np.savez(path, rows=np.array([[{}]], dtype=object))
    with pytest.raises(InvalidFile, match="Python objects"):
        load_traffic(path)


# --- traces


def test_a_trace_survives_its_file_and_gives_a_demand_per_record_and_layer(tmp_path):
    trace = Trace(counts((2, 3, 4, 5)).astype(np.uint16), [10, 20], {"model": "m"})
    save_trace(trace, tmp_path / "r.npz")
    loaded = load_trace(tmp_path / "r.npz")
    assert loaded.counts.dtype == np.uint16
    assert np.array_equal(loaded.counts, trace.counts)
    assert loaded.steps.tolist() == [10, 20]
    assert loaded.meta == {"model": "m"}
    assert np.array_equal(loaded.demand(1, 2).rows, trace.counts[1, 2])
    assert (loaded.num_records, loaded.num_layers, loaded.num_ranks, loaded.num_experts) == (2, 3, 4, 5)
    with pytest.raises(InvalidDemand, match=r"no layer 3; it has layers 0\.\.2"):
        loaded.demand(0, 3)


def test_a_trace_is_not_taken_for_traffic_nor_the_reverse(tmp_path):
    save_trace(Trace(counts((1, 1, 2, 2))), tmp_path / "r.npz")
    with pytest.raises(InvalidFile, match="load_trace") as error:
        load_traffic(tmp_path / "r.npz")
    assert message(error).count("r.npz") == 1
    save_demand(Demand(counts((2, 2))), tmp_path / "d.npz")
    with pytest.raises(InvalidFile, match="no array 'counts'"):
        load_trace(tmp_path / "d.npz")


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"counts": counts((2, 2))}, "record, layer, rank, expert"),
        ({"counts": -counts((1, 1, 2, 2))}, "zero or more"),
        ({"counts": np.full((1, 1, 2, 2), 0.5)}, "float64"),
        ({"counts": counts((1, 1, 2, 2)), "steps": np.arange(3)}, "1 records"),
        ({"counts": counts((1, 1, 2, 2)), "meta": np.array("{")}, "meta is not JSON"),
        (
            {"counts": counts((1, 1, 2, 2)), "meta": np.array([2**31], np.uint32).view("U1")},
            "damaged",
        ),  # no letter
        ({"counts": counts((1, 1, 2, 2)), "meta": np.array("[]")}, "JSON object"),
    ],
)
def test_a_bad_trace_gets_one_line(tmp_path, arrays, expected):
    np.savez(tmp_path / "r.npz", **arrays)
    with pytest.raises(MoeyardError) as error:
        load_trace(tmp_path / "r.npz")
    assert expected in message(error)


def test_the_recorded_traces_load(root):
    folder = root.parent / "shared" / "traces"
    files = sorted(folder.glob("*.npz"))
    if not files:
        pytest.skip("no recorded traces beside the repository")
    for path in files:
        trace = load_trace(path)
        meta = json.loads(json.dumps(dict(trace.meta)))
        assert (trace.num_layers, trace.num_ranks, trace.num_experts) == (
            meta["layers"],
            meta["ranks"],
            meta["experts"],
        )
        assert trace.demand(-1, 0).rows.sum() > 0
