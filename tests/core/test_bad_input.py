"""Input that used to end in a traceback, or in a wrong answer: each gets one line with the place, the values and the fix."""

import json
import zipfile

import numpy as np
import pytest

import moeyard as my
from moeyard.formats import load_cluster, load_timeline, load_traffic
from moeyard.formats.models import load_model
from moeyard.formats.placements import load_placement
from slow_flow import plan

PORT = my.Port(1e9, 1e-5)
CLUSTER = my.Cluster(2, 2, PORT, PORT)


def line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("rows", [2**61, 2**62 // 16])
def test_rows_whose_sum_leaves_64_bits_are_refused(rows):
    with pytest.raises(
        my.InvalidTraffic, match=r"rows in all; sums of rows must stay below 2\*\*62"
    ) as error:
        my.Traffic(np.full((4, 4), rows), 1)
    assert str(16 * rows) in line(error)
    with pytest.raises(my.InvalidDemand, match=r"2\*\*62"):
        my.Demand(np.full((4, 4), rows))


def test_the_largest_sum_is_taken():
    assert my.Traffic([[2**62 - 1]], 1).rows[0, 0] == 2**62 - 1


def test_unsigned_counts_do_not_turn_negative():
    with pytest.raises(my.InvalidTraffic, match=r"\[0, 0\] is 9223372036854775809; .* below 2\*\*62"):
        my.Traffic(np.array([[2**63 + 1]], np.uint64), 1)


BAD_BYTES = [float("nan"), float("inf"), -1, 0, 1.5, 2**41, "8", None, True]


@pytest.mark.parametrize("value", BAD_BYTES, ids=map(repr, BAD_BYTES))
def test_row_bytes_must_be_whole(value):
    for make in (lambda: my.Traffic([[1]], value), lambda: my.workload("balanced", 4, mb=1, row_bytes=value)):
        with pytest.raises(my.InvalidTraffic, match="row_bytes must be a whole number") as error:
            make()
        assert line(error).endswith(f"got {value!r}")


def test_a_cluster_nobody_has_memory_for_is_refused(tmp_path):
    with pytest.raises(
        my.InvalidCluster, match=r"1000000000 nodes x 8 ranks are more than 1048576 ranks; use fewer"
    ):
        my.Cluster(10**9, 8, PORT, PORT)
    path = tmp_path / "c.toml"
    my.save_cluster(CLUSTER, path)
    path.write_text(path.read_text().replace("nodes = 2", "nodes = 1000000000"))
    with pytest.raises(my.InvalidCluster, match=r"c\.toml: 1000000000 nodes"):
        load_cluster(path)


DEEP = 5000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"rails = " + b"[" * DEEP + b"]" * DEEP, "nested too deep"),
        (b"nodes = " + b"9" * 5000, "not TOML"),
        ("name = 'Å'".encode("latin-1"), "not TOML"),
    ],
    ids=["deep", "digits", "not UTF-8"],
)
def test_a_hostile_cluster_file_gets_one_line(tmp_path, content, expected):
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(my.InvalidFile, match=expected) as error:
        load_cluster(tmp_path / "c.toml")
    assert line(error).startswith(str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[" * 200_000, b'{"a": '], ids=["not UTF-8", "deep", "cut off"]
)
@pytest.mark.parametrize("load", [load_model, load_placement, my.load_schedule])
def test_hostile_json_gets_one_line(tmp_path, load, content):
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(my.InvalidFile) as error:
        load(tmp_path / "c.json")
    assert line(error).startswith(str(tmp_path / "c.json"))


def npy(shape, content=b"", kind="<i8"):
    header = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


@pytest.mark.parametrize("shape", [(10**9, 10**9), (10**6, 10**4), (2, 2)])
def test_a_header_that_lies_is_not_believed(tmp_path, shape):
    (tmp_path / "t.npy").write_bytes(npy(shape, bytes(8)))
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("rows.npy", npy(shape, bytes(8)))
    for path in (tmp_path / "t.npy", tmp_path / "t.npz"):
        with pytest.raises(my.InvalidFile, match=r"its header promises \d+ bytes .* there are 8") as error:
            load_traffic(path)
        assert line(error).startswith(f"{path}: ")


def test_an_honest_header_is(tmp_path):
    (tmp_path / "t.npy").write_bytes(npy((2, 2), np.arange(4).tobytes()))
    assert load_traffic(tmp_path / "t.npy").rows.tolist() == [[0, 1], [2, 3]]
    np.save(tmp_path / "f.npy", np.asfortranarray(np.arange(4).reshape(2, 2)))
    assert load_traffic(tmp_path / "f.npy").rows.tolist() == [[0, 1], [2, 3]]


def test_a_placement_of_too_many_ranks_gets_one_line(tmp_path):
    data = {"format": "moeyard placement 1", "planner": "", "ranks": 10**12, "home": [0], "hosts": [[0]]}
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(my.InvalidFile, match=r"p\.json: ranks is 1000000000000; there can be at most"):
        load_placement(tmp_path / "p.json")


# ---- timelines


@pytest.fixture
def saved(tmp_path):
    """The arrays of a timeline's file, and a way to write them."""
    path = tmp_path / "t.npz"
    my.simulate(CLUSTER, plan(CLUSTER, [(0, 0, 2, 4), (1, 2, 3, 8)], [[], [0]])).save(path)
    with np.load(path) as file:
        arrays = dict(file)

    def write(**changes):
        np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
        return path

    return arrays, write


def meta(arrays, **changes):
    data = json.loads(str(arrays["meta"])) | changes
    return np.array(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cause": None}, "no array 'cause'"),
        ({"meta": None}, "no array 'meta'"),
        ({"meta": np.array("{")}, "meta"),
        ({"end": np.zeros(5)}, "array 'end' is float64 of shape"),
        ({"src": np.array(["a", "b"])}, "array 'src' is"),
        ({"src": np.array([0, 9])}, "a rank outside 0..3"),
        ({"cause": np.array([0, 9])}, "a message outside 0..1"),
        ({"traffic_rows": np.zeros((3, 3), int)}, "3 ranks on a cluster of 4"),
        ({"traffic_rows": np.zeros(3)}, "matrix"),
        ({"row_bytes": np.array(1.5)}, "row_bytes must be one whole number"),
    ],
)
def test_a_damaged_timeline_gets_one_line(saved, changes, expected):
    path = saved[1](**changes)
    with pytest.raises(my.MoeyardError) as error:
        load_timeline(path)
    assert line(error).startswith(f"{path}: ")
    assert expected in line(error)


@pytest.mark.parametrize("key", ["cluster", "scheduler", "tolerance", "sharings", "kinds"])
def test_a_timeline_without_a_key_says_which(saved, key):
    arrays, write = saved
    with pytest.raises(my.InvalidFile, match=f"missing key '{key}'"):
        load_timeline(write(meta=meta(arrays, **{key: None})))


def test_a_timeline_of_a_bad_cluster_says_where(saved):
    arrays, write = saved
    with pytest.raises(my.InvalidFile, match=r"t\.npz: meta: \[cluster\]: unknown key 'node'"):
        load_timeline(write(meta=meta(arrays, cluster={"node": 2})))


def test_the_methods_on_nouns_are_the_formats(tmp_path):
    assert my.Cluster.load is load_cluster
    assert my.Timeline.load is load_timeline
