"""A node dies under torchrun; the other goes on from the latest checkpoint, alone, as if nothing had happened."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.long, pytest.mark.timeout(600)]

LINE = re.compile(r"step (\d+): loss ([\d.]+) on (\d+) ranks")
STEPS, NODES, PER = 400, 2, 2
# Both must be there before the last call is over, or the second node comes as one that joins a job that runs.
RDZV = "join_timeout=90,last_call_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=3"


def environment(root):
    return os.environ | {
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_LOG_LEVEL": "ERROR",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as the example says
    }


def start_node(root, out, log, port, steps):
    """An agent with its ranks, in a group of processes of its own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{NODES}", "--nproc-per-node", str(PER),
        "--max-restarts", "5", "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-id", "job",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", RDZV, "--local-addr", "127.0.0.1",
        str(root / "examples" / "elastic.py"), "--out", str(out), "--steps", str(steps), "--timeout", "8",
    ]  # fmt: skip
    with open(log, "w") as file:
        return subprocess.Popen(command, env=environment(root), stdout=file, stderr=file)


def lines(*logs):
    """[(step, loss, ranks)] in the order printed."""
    text = "\n".join(log.read_text() for log in logs if log.exists())
    return [(int(step), float(loss), int(ranks)) for step, loss, ranks in LINE.findall(text)]


def until(condition, seconds, log):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)


def listens(port):
    """Does the first node's agent keep the rendezvous? Who comes first does, and it must not be the one that is killed."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def children(pid):
    """Of a process that we started."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[1]) == pid:
                    found.append(int(name))
        except OSError:
            continue
    return found


def kill_node(agent):
    """Agent and ranks at once, as when a machine is gone."""
    ranks = children(agent.pid)
    agent.kill()
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def test_training_goes_on_without_the_lost_node(root, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [tmp_path / f"node{number}" for number in range(NODES)]
    out = tmp_path / "out"
    first = start_node(root, out, logs[0], port, STEPS)  # keeps the rendezvous
    try:
        until(lambda: listens(port), 120, logs[0])
        second = start_node(root, out, logs[1], port, STEPS)
        try:
            wide = lambda: [one for one in lines(*logs) if one[2] == NODES * PER]  # noqa: E731
            until(lambda: len(wide()) > 12, 240, logs[0])
        finally:
            kill_node(second)
        narrow = lambda: [one for one in lines(logs[0]) if one[2] == PER]  # noqa: E731
        until(lambda: len(narrow()) > 12, 240, logs[0])
    finally:
        kill_node(first)
    before, after = wide(), narrow()
    saved = [step for step in range(0, before[-1][0] + 2, 5) if step <= before[-1][0] + 1]
    assert after[0][0] in saved[-2:], "not from the latest checkpoint"
    known = {step: loss for step, loss, _ in before}
    again = [(loss, known[step]) for step, loss, _ in after if step in known]
    assert all(loss == pytest.approx(old, rel=1e-4) for loss, old in again)
    curve = known | {step: loss for step, loss, _ in after}
    assert sorted(curve) == list(range(after[-1][0] + 1)), "steps were left out"
    text = logs[0].read_text()
    assert "RankLost" in text
    named = re.search(r"rank ([\d, ]+) is gone", text)
    assert named, text[-3000:]
    assert named[1] in ("0, 1", "2, 3"), "the ranks of one node"
