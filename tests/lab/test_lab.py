"""Real ranks on shaped rails: the environment, the rates, what fails, what changes, and what is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kills import TOKEN, leftovers, one_kill

import moeyard.lab as lab
from moeyard.cluster import Cluster, Port

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]
HERE = Path(__file__).resolve().parent
PAYLOAD = 6.25e6 * 1448 / 1514  # bytes per second of a rail of lab-2x2


@pytest.fixture(autouse=True)
def jobs(monkeypatch):
    """The ranks find jobs.py."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_a_plain_script_runs_as_under_torchrun(rails, capfd):
    found = lab.run("lab-2x2", "jobs:plain", {"megabytes": 1.0}, network="rails", warm=False)
    for rank, one in enumerate(found):
        node, local = divmod(rank, 2)
        assert one["environment"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(node),
            "GLOO_SOCKET_IFNAME": f"rail{local}",
        }
        assert one["sum"] == 6.0
        assert one["right"] == [0, 1, 2, 3]
        # A node's ranks send 1 MB to the other node over two rails; no faster than these allow, bursts aside.
        assert one["seconds"] > 0.8 * 1e6 / (2 * PAYLOAD)
    # rank 0 (rail 0) and rank 3 (rail 1): gloo used the lower of the two rails, both ways
    moved = found[0]["moved"]
    assert all(node[0] > 500_000 for node in moved), moved
    assert all(node[1] < 100_000 for node in moved), moved
    out, err = capfd.readouterr()
    assert sorted(out.split("\n"))[1:] == [f"[rank {r}] rank {r} is done" for r in range(4)]
    assert "2 nodes x 2 ranks, 2 rails at 50 Mbit/s each" in err


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("kill", 137)])
def test_a_rank_that_fails_ends_the_others(rails, tmp_path, capfd, how, code):
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport jobs\njobs.fail(2, sys.argv[1])\n")
    arguments = {"network": "rails", "grace": 0.5, "warm": False, "show": "first"}
    assert lab.run_script("lab-2x2", script, [how], **arguments) == code
    err = capfd.readouterr().err
    assert "rank 2" in err
    assert ("on purpose" in err) == (how == "raise")


def test_a_cut_rail_is_found_and_planned_around(rails):
    timeout = 4.0
    found = lab.run(
        "lab-2x2",
        "jobs:broken_rail",
        {"timeout": timeout, "steps": 4, "slow_at": 1, "cut_at": 2},
        network="rails",
    )
    used = {rail for one in found for rail in one["rails"]}
    assert used == {0}, "rail 1 has a dead end"
    for rank, one in enumerate(found):
        assert one["cluster"] == pytest.approx(PAYLOAD)
        assert one["bound"]
        assert one["dead"] == [(1, 1)]
        assert timeout <= one["seconds"] < timeout + 6.0
        assert "a rail may be dead" in one["message"]
        assert one["first"] == [float(32 * 64 * rank + 10_000 * origin) for origin in range(4)]
        slow = one["slow"]  # with two nodes, both ends of the rail look slow
        assert all(0.1 < node[0] < 0.5 for node in slow), slow
        assert all(node[1] > 2 * node[0] for node in slow), slow


def test_datacenters_are_far_apart(rails):
    """Rows and control alike; a wan port slows and mends, and a cut one mends itself."""
    port = Port(6.25e6, 1e-3)
    cluster = Cluster(4, 1, port, port, datacenters=2, wan=Port(1.25e6, 20e-3))
    found = lab.run(cluster, "jobs:delay", {"repeat": 9}, network="rails", warm=False)[0]
    assert found["near"] < 0.010
    for far in (found["rows"], found["control"]):
        assert 0.040 <= far < 0.080
    megabyte, slow = found["megabyte"], found["slow"]
    assert megabyte > 0.8 * 1e6 / 1.25e6
    assert slow > 3 * megabyte
    assert found["cut"] > 2.0
    out, back = found["moved"]
    assert 3e6 <= out < 4e6  # three megabytes, whatever was sent twice, and headers
    assert back < 3e5
    assert "no datacenter 2: they are 0..1" in found["refused"]


def test_where_namespaces_are_refused_it_says_so(rails, tmp_path):
    """`auto` runs unshaped and names the step; `rails` is an error."""
    script = tmp_path / "script.py"
    script.write_text(
        "import jobs, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nx = torch.ones(1)\n"
        "dist.all_reduce(x)\nprint(int(x), jobs.where())\n"
    )
    for network, code in (("auto", 0), ("rails", 70)):
        command = [
            "-m",
            "moeyard",
            "lab",
            "run",
            "lab-2x2",
            "--no-warm",
            "--network",
            network,
            "--",
            str(script),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(HERE / "refuse.py"), *command], env=environment, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "network namespace: " in done.stderr
        assert ("UNSHAPED, all ranks on loopback" in done.stderr) == (network == "auto")
        assert done.stdout.count("4 ('lo', False, None)") == (4 if network == "auto" else 0)


@pytest.mark.long
def test_nothing_is_left_when_killed_at_any_moment(rails):
    for seed in range(4):
        outcome = one_kill(seed, moment=(0.1, 2.0), running=seed % 2 == 1)
        assert not outcome["left"], outcome


def test_an_interrupted_lab_ends_at_once(rails, tmp_path):
    script = tmp_path / "wait.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    token = f"interrupt-{os.getpid()}"
    command = [sys.executable, "-m", "moeyard", "lab", "run", "lab-2x2", "--no-warm", "--", str(script)]
    environment = os.environ | {TOKEN: token}
    # A job in the background of a shell may have been started deaf to interrupts.
    hear = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=hear
    ) as caller:
        assert "ready" in caller.stdout.readline()
        caller.send_signal(2)
        caller.wait(20)
    assert caller.returncode != 0
    assert not leftovers(token, patience=5.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: the other tests run as an ordinary user already")
def test_an_ordinary_user_can(rails, tmp_path):
    """Two datacenters, so that a relay runs as well."""
    interpreter = next(
        (
            p
            for p in (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
            if _others_may(p)
        ),
        None,
    )
    if interpreter is None or not _others_may(HERE):
        pytest.skip("no interpreter of this version, or no checkout, that an ordinary user may read")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:  # down to pytest's own, whatever a worker calls them
        if folder == Path(tempfile.gettempdir()) or folder.stat().st_uid != 0:
            break
        folder.chmod(folder.stat().st_mode | 0o055)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    script = tmp_path / "who.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', int(x))\n"
    )
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(home),
        "NUMBA_CACHE_DIR": str(home / "numba"),
    }
    command = [
        interpreter,
        "-m",
        "moeyard",
        "lab",
        "run",
        "lab-2dc",
        "--no-warm",
        "--network",
        "rails",
        "--",
        str(script),
    ]
    done = subprocess.run(
        command, env=environment, user=65534, group=65534, extra_groups=[], cwd=home, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 8") == 8


def _others_may(path):
    """May an ordinary user follow and read this path, whatever it links to?"""
    path = Path(path)
    if not path.exists():
        return False
    real = path.resolve()
    return all(
        step.stat().st_mode & 0o005 == 0o005 for step in (real, *real.parents, *path.absolute().parents)
    )
