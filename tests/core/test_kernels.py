"""What holds for every kernel: its size, its one signature, a reference; and for the objects on disk: never stale, never in the way."""

import ast
import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import typeof, types

import moeyard as my
from moeyard.kernels import compile as objects
from moeyard.kernels.signatures import FILE, arguments, written

MACHINERY = {"compile", "build", "worker", "signatures"}
MOST_LINES, MOST_PARAMETERS = 59, 9
# Kernels still above a limit. None may be added; whoever mends one takes it out.
TOO_LARGE = set[str]()


# Files whose reference is reached by way of what calls them: where it is.
BY_WAY_OF = {
    "place.likely": ("core/test_likely.py", "test_the_kernel_does_what_it_says"),
    "common.heap": ("slow_flow.py", "slow_simulate"),
    "cost.blocks": ("core/test_estimate.py", "test_straight_blocks_take_as_long_as_their_slowest_nic"),
    "cost.clock": ("core/test_estimate.py", "test_across_datacenters_message_by_message_is_the_simulation"),
    "cost.inside": ("core/test_estimate.py", "test_across_datacenters_the_estimate_is_near_the_simulation"),
    "cost.looks": ("core/test_estimate.py", "test_first_looks_are_the_busiest_nodes"),
    "cost.moves": ("core/test_estimate.py", "slow_inside"),
    "cost.operations": (
        "core/test_estimate.py",
        "test_across_datacenters_the_estimate_is_near_the_simulation",
    ),
    "cost.relays": ("core/test_relays.py", "test_the_estimate_follows_gateways"),
    "cost.times": ("core/test_estimate.py", "test_one_to_one_messages_are_timed_exactly"),
    "cost.walk": ("core/test_estimate.py", "test_one_to_one_messages_are_timed_exactly"),
    "cost.wire": ("core/test_estimate.py", "test_one_to_one_messages_are_timed_exactly"),
    "lanes.emit": ("core/test_estimate.py", "slow_match"),
    "lanes.loads": ("core/test_estimate.py", "slow_handed"),
    "lanes.parts": ("core/test_schedulers.py", "test_running_it_equals_a_plain_all_to_all"),
    "flow.run": ("slow_flow.py", "slow_simulate"),
    "flow.sharing": ("slow_flow.py", "max_min"),
    "program.blocks": (
        "core/test_program_kernels.py",
        "test_what_leaves_a_rank_is_what_arrives_and_every_block_goes_whole",
    ),
    "program.lower": ("core/test_program_kernels.py", "slow_program"),
    "program.verify": ("core/test_program_kernels.py", "slow_legal"),
    "relays.parts": ("core/test_relays.py", "slow_transfers"),
    "stages.after": ("slow_stages.py", "slow_assemble"),
    "stages.relays": ("core/test_relays.py", "slow_transfers"),
}
# Files still without one. None may be added.
NO_REFERENCE = set[str]()


def rooms(root):
    """(module below kernels, its syntax tree) of every file of kernels."""
    folder = root / "src" / "moeyard" / "kernels"
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        if path.name != "__init__.py" and name not in MACHINERY:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def functions(root):
    for module, tree in rooms(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield f"{module}.{node.name}", node


def test_a_kernel_can_be_read_at_once(root):
    large = {
        name
        for name, node in functions(root)
        if node.end_lineno - node.lineno + 1 > MOST_LINES or len(node.args.args) > MOST_PARAMETERS
    }
    assert not large - TOO_LARGE, f"over {MOST_LINES} lines or {MOST_PARAMETERS} parameters"
    assert not TOO_LARGE - large, "mended: take these off the list"


def test_every_file_of_kernels_has_a_reference(root):
    named = set()
    for path in (root / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moeyard.kernels"):
                room = node.module.removeprefix("moeyard.kernels").removeprefix(".")
                named |= {room, *(f"{room}.{alias.name}".removeprefix(".") for alias in node.names)}
    for file, function in BY_WAY_OF.values():
        assert f"def {function}(" in (root / "tests" / file).read_text(encoding="utf-8")
    with_kernels = {name.rpartition(".")[0] for name, node in functions(root) if node.decorator_list}
    without = with_kernels - named - BY_WAY_OF.keys()
    assert without == NO_REFERENCE  # whoever mends one takes it off the list


def signatures(root, what):
    """What `tests.signatures` finds. `make signatures` writes the table anew."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.signatures", what],
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(made.stdout.splitlines()[-1])


def test_every_kernel_has_one_signature_the_one_in_the_table(root):
    """From the entries' types in the table down, as compiled; that Python calls them so is the next test's."""
    found, leaks = signatures(root, "--compiled")
    assert found == {
        name: [one] for name, one in json.loads(FILE.read_text(encoding="utf-8"))["kernels"].items()
    }
    assert leaks == [], "these count no references, but get hold of an array"


@pytest.mark.long
def test_the_table_is_what_python_calls(root):
    found, twice, leaks = signatures(root, "--show")
    assert twice == {}
    assert leaks == [], "these count no references, but get hold of an array"
    assert found == json.loads(FILE.read_text(encoding="utf-8"))


def test_a_signature_is_read_as_it_was_written():
    matrix = np.zeros((2, 3))
    frozen = np.arange(3)
    frozen.flags.writeable = False
    values = (1, 2.0, True, matrix, matrix.T, matrix[:, 0], frozen, (1, 2), (1, 2.0, frozen), np.uint64(3))
    for kinds in (tuple(map(typeof, values)), (), (types.int64,)):
        assert arguments(", ".join(map(written, kinds))) == kinds


def test_what_goes_to_another_process_keeps_its_kind_of_array():
    cluster = my.Cluster(2, 2, my.Port(10**9, 0), my.Port(1e9, 1e-5))
    demand = my.Demand(np.arange(16).reshape(4, 4))
    placement = my.place(cluster, demand, "quota", 1)
    served = my.assign(cluster, demand, placement, "quota")
    for one in (cluster, demand, placement, served, served.traffic(8)):
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            for name, value in vars(other).items():
                kept = getattr(one, name)
                assert type(kept) is type(value)
                if isinstance(value, np.ndarray):
                    assert typeof(value) == typeof(kept)
                    assert value.tolist() == kept.tolist()


def test_whole_numbers_compile_nothing_anew():
    assert [type(x) for x in (my.Port(10**9, 0).bandwidth, my.Port(10**9, 0).latency)] == [float, float]


def test_one_message_is_estimated_by_the_kernel_of_many(monkeypatch):
    """The columns of a table with one row are views of it, and read-only like it."""
    import moeyard.estimate  # noqa: F401

    module, port, seen = sys.modules["moeyard.estimate"], my.Port(1e9, 1e-5), []
    kernel = module.seconds_by_time
    monkeypatch.setattr(module, "seconds_by_time", lambda *given: seen.append(given) or kernel(*given))
    cluster = my.Cluster(2, 1, port, port, datacenters=2, wan=port)
    my.estimate(cluster, my.schedule(cluster, my.Traffic([[0, 3], [0, 0]], 8), "ecmp"))
    known = json.loads(FILE.read_text(encoding="utf-8"))["kernels"]["cost.clock.seconds_by_time"]
    assert {", ".join(written(typeof(one)) for one in given) for given in seen} == {known}


# A package of two kernels in two files, with the machinery of the real one.

INNER = "from moeyard.kernels.compile import kernel\n\n\n@kernel\ndef inner(x):\n    return x + {}\n"
OUTER = """from moeyard.kernels.compile import kernel
from moeyard.kernels.trial.inner import inner


@kernel
def outer(values):
    total = 0
    for value in values:
        total += inner(value)
    return total
"""
TABLE = {
    "commands": {"trial": ["trial.outer.outer"]},
    "entries": ["trial.outer.outer"],
    "kernels": {"trial.inner.inner": "int64", "trial.outer.outer": "int64[1C]"},
}
CALL = "import numpy as np; from moeyard.kernels.trial.outer import outer; print(outer(np.arange(3)))"
CALL_INNER = "from moeyard.kernels.trial.outer import inner; print(inner(3))"


@pytest.fixture
def trial(tmp_path, root):
    source, package = root / "src" / "moeyard", tmp_path / "src" / "moeyard"
    (package / "kernels" / "trial").mkdir(parents=True)
    for name in ("__init__.py", "version.py", *(f"kernels/{one}.py" for one in ("__init__", *MACHINERY))):
        shutil.copy(source / name, package / name)
    (package / "kernels" / "trial" / "inner.py").write_text(INNER.format(1))
    (package / "kernels" / "trial" / "outer.py").write_text(OUTER)
    (package / "kernels" / "signatures.json").write_text(json.dumps(TABLE))
    return package / "kernels"


def run(kernels, code, **env):
    """(what it prints, what it says on stderr) in a process with that package and a home of its own."""
    home = kernels.parents[2] / "home"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    made = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": str(kernels.parents[1]), "HOME": str(home)} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip(), made.stderr


def kept(folder):
    """{kernel: kind of its object} in the one stamp of this place."""
    (stamp,) = folder.iterdir()
    found = [path for path in stamp.iterdir() if path.name != ".lock"]
    assert all("-" in path.name for path in found)  # nothing left lying about
    return {
        f"{path.name.rpartition('-')[0]}{path.suffix}": path.read_bytes().split()[0].decode()
        for path in found
    }


def test_a_missing_kernel_is_compiled_beside_with_a_line_and_then_kept(trial):
    shown, said = run(trial, CALL)
    assert (shown, said.splitlines()[0][:13]) == ("6", "compiling 0/2")
    assert "compiled 2/2" in said
    assert kept(trial / "__pycache__" / "objects") == {
        "trial.inner.inner.link": "ahead",
        "trial.outer.outer.code": "ahead",
    }
    made = (trial / "__pycache__" / "objects").rglob("*.code")
    assert {path.stat().st_mode & 0o777 for path in made} == {0o644}, (
        "other users of the install cannot read it"
    )
    assert run(trial, CALL) == ("6", "")
    # Python calls what only kernels called before: the object without machine code is not taken for one that has it.
    assert run(trial, CALL_INNER)[0] == "4"
    assert kept(trial / "__pycache__" / "objects")["trial.inner.inner.code"] == "called"


def test_an_edited_kernel_is_never_run_stale(trial):
    assert run(trial, CALL)[0] == "6"
    (trial / "trial" / "inner.py").write_text(INNER.format(10))  # another file than the one that is called
    shown, said = run(trial, CALL)
    assert shown == "33"
    assert "compiling 0/2" in said
    (trial / "trial" / "inner.py").write_text(INNER.format(1))
    assert run(trial, CALL) == ("6", "")  # the old state still has its objects


def test_the_stamp_knows_every_file(root, tmp_path):
    copy = tmp_path / "kernels"
    shutil.copytree(
        root / "src" / "moeyard" / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__", "*.nb?")
    )
    stamps = {objects._stamp_of(copy)}
    assert stamps == {objects.STAMP}
    files = sorted(copy.rglob("*.py"))
    for path in files:
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        stamps.add(objects._stamp_of(copy))
    assert len(stamps) == len(files) + 1


def test_an_install_that_cannot_be_written_keeps_its_objects_with_the_user(trial, tmp_path):
    (trial / "__pycache__").mkdir(exist_ok=True)
    (trial / "__pycache__" / "objects").write_text("")  # no folder can be made here, by root neither
    assert run(trial, CALL)[0] == "6"
    assert set(kept(tmp_path / "home" / ".cache" / "moeyard" / "kernels")) == {
        "trial.inner.inner.link",
        "trial.outer.outer.code",
    }
    assert run(trial, CALL) == ("6", "")
    cache = tmp_path / "elsewhere"
    assert run(trial, CALL, XDG_CACHE_HOME=str(cache))[0] == "6"
    assert len(kept(cache / "moeyard" / "kernels")) == 2


def test_without_any_place_to_write_kernels_still_run(trial, tmp_path):
    (trial / "__pycache__").mkdir(exist_ok=True)
    (trial / "__pycache__" / "objects").write_text("")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").write_text("")
    assert run(trial, CALL) == ("6", "compiling trial.outer.outer\n")
    assert run(trial, CALL, NUMBA_DISABLE_JIT="1") == ("6", "")


def test_processes_that_start_at_once_do_no_harm(trial):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(trial, CALL), range(4)))
    assert [shown for shown, _ in results] == ["6"] * 4
    assert sum("compiling 0/2" in said for _, said in results) == 1  # the others waited
    assert len(kept(trial / "__pycache__" / "objects")) == 2


def test_a_worker_that_ends_early_leaves_the_work_to_the_call(trial):
    worker = trial / "worker.py"
    worker.write_text("import sys\nsys.exit(1)\n")
    assert run(trial, CALL)[0] == "6"
    assert kept(trial / "__pycache__" / "objects") == {
        "trial.inner.inner.code": "called",
        "trial.outer.outer.code": "called",
    }


def test_only_the_stamps_used_last_are_left(tmp_path, monkeypatch):
    for age in range(7):
        (tmp_path / f"old{age}").mkdir()
        (tmp_path / f"old{age}" / "object").write_text("")
        os.utime(tmp_path / f"old{age}", (1e9 - age, 1e9 - age))
    (tmp_path / objects.STAMP).mkdir()
    objects._prune(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {objects.STAMP, "old0", "old1", "old2", "old3"}


STORM = """
import signal, sys
import numpy as np
import moeyard as my

def interrupt(*_):
    raise KeyboardInterrupt

cluster = my.Cluster.load("lab-2x2")
demand = my.Demand(np.random.default_rng(0).integers(1, 99, (4, 8)))
my.place(cluster, demand, "auto")  # loads what it runs
signal.signal(signal.SIGALRM, interrupt)
rng, stops = np.random.default_rng(1), 0
while stops < 400:
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 3e-3))
        while True:
            my.place(cluster, demand, "auto")
    except KeyboardInterrupt:
        stops += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(stops)
"""


def test_an_interrupt_in_a_kernel_is_an_exception_not_the_end_of_the_process(root):
    """numba asks Python for the type of what a kernel returns; raised there, a Ctrl-C was a null pointer."""
    there = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, "-c", STORM], env=there, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "400"), done.stderr[-500:]
