"""The page of a run: it follows, and answers only who has the token and comes from it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from moeyard.errors import MoeyardError
from moeyard.live.state import run_state

pytest.importorskip("starlette", reason="pip install 'moeyard[live]'")
pytest.importorskip("uvicorn", reason="pip install 'moeyard[live]'")


def write(folder, *entries):
    (folder / "moeyard").mkdir(exist_ok=True)
    (folder / "options.json").write_text(json.dumps({"steps": 9, "modes": ["moeyard"]}))
    with (folder / "moeyard" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in entries)


def step(number):
    return {"step": number, "seconds": 0.5, "loss": 2.0, "rows_per_rail": {"out": [[1, 2]], "in": [[2, 1]]}}


@pytest.fixture
def server(tmp_path):
    from moeyard.live.server import Server

    orders = []

    def obey(asked):
        if asked.get("what") != "break":
            raise MoeyardError("no such order")
        orders.append(asked)
        return "cut"

    write(tmp_path, step(0))
    made = Server(tmp_path, order=obey)
    made.orders = orders
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made
    made.stop()
    thread.join(10)


def ask(server, path, data=None, **headers):
    """(status, body)"""
    headers = {key.replace("_", "-"): value for key, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_state_follows_the_run_and_shows_a_lost_rail(server):
    path = f"/state.json?token={server.token}"
    state = json.loads(ask(server, path)[1])
    assert (state["steps"], state["ended"], state["modes"][0]["done"]) == (9, False, 1)
    write(server.folder, step(1), {"step": 1, "event": "rail lost", "detail": "node 0 rail 1"})
    with (server.folder / "moeyard" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "sec')  # half a line
    mode = json.loads(ask(server, path)[1])["modes"][0]
    assert mode["done"] == 2
    assert mode["events"] == [{"step": 1, "event": "rail lost", "detail": "node 0 rail 1"}]
    assert mode["rows_per_rail"]["out"] == [[1, 2]]
    (server.folder / "run.json").write_text("{}")
    assert json.loads(ask(server, path)[1])["ended"]


def test_the_address_has_the_page(server):
    path = server.address.removeprefix(f"http://127.0.0.1:{server.port}")
    status, body = ask(server, path)
    assert status == 200
    assert "Seconds a step" in body


@pytest.mark.parametrize("path", ["/", "/state.json"])
def test_who_has_no_token_or_comes_from_elsewhere_gets_403(server, path):
    good = f"{path}?token={server.token}"
    own = f"http://127.0.0.1:{server.port}"
    assert ask(server, good, Origin=own)[0] == 200
    assert ask(server, path)[0] == 403
    assert ask(server, f"{path}?token=x")[0] == 403
    assert ask(server, good, Origin="http://evil.example")[0] == 403
    assert ask(server, good, Origin="null")[0] == 403
    assert ask(server, good, Host="evil.example")[0] == 403
    assert ask(server, good.replace(server.token, server.token.swapcase()))[0] == 403
    assert ask(server, good, Host=f"evil.example:{server.port}")[0] == 403


def test_without_the_token_nobody_learns_what_there_is(server):
    for path in ("/", "/state.json", "/order", "/nothing", "/../../etc/passwd"):
        assert ask(server, path)[0] == 403
        assert ask(server, path, b"{}")[0] == 403
    assert ask(server, f"/nothing?token={server.token}")[0] == 404
    assert ask(server, f"/order?token={server.token}")[0] == 405


def test_orders_need_the_token_and_the_origin_and_a_meaning(server):
    own, body = (
        f"http://127.0.0.1:{server.port}",
        json.dumps({"what": "break", "node": 0, "rail": 1}).encode(),
    )
    for wrong in ({"X_Token": server.token}, {"Origin": own}, {"X_Token": "x", "Origin": own},
                  {"X_Token": server.token, "Origin": "http://evil.example"},
                  {"X_Token": server.token, "Origin": own, "Host": "evil.example"}):  # fmt: skip
        assert ask(server, "/order", body, **wrong)[0] == 403
    right = {"X_Token": server.token, "Origin": own}
    assert ask(server, f"/order?token={server.token}", body, Origin=own)[0] == 403  # an address is no header
    assert not server.orders
    assert ask(server, "/order", body, **right) == (200, '{"done": "cut"}')
    assert server.orders == [json.loads(body)]
    for bad in (b"{}", b"[1]", b"{", b"x" * 5000):
        assert ask(server, "/order", bad, **right)[0] in (400, 413)
    assert len(server.orders) == 1


def test_a_page_that_only_watches_takes_no_orders(tmp_path):
    from moeyard.live.server import Server

    server = Server(tmp_path)
    assert "/order" not in [route.path for route in server.app().routes]
    with pytest.raises(MoeyardError, match="take another"):
        Server(tmp_path, port=server.port)
    server.stop()


def test_tokens_differ_and_are_long(tmp_path):
    from moeyard.live.server import Server

    a, b = Server(tmp_path), Server(tmp_path)
    assert a.token != b.token
    assert len(a.token) >= 32
    a.stop()
    b.stop()


def test_an_order_that_is_none_is_refused():
    from moeyard.cli.demo import obey

    for wrong in ({}, {"what": "rm", "node": 0, "rail": 0}, {"what": "break", "node": "0", "rail": 0},
                  {"what": "slow", "node": 0, "rail": 0, "factor": True}, {"what": "slow", "node": 0, "rail": 0, "factor": 7}, {"what": "slow", "node": 0, "rail": 0}):  # fmt: skip
        with pytest.raises(MoeyardError):
            obey(wrong, "1")


def test_orders_are_for_our_own_lab_whatever_else_runs_here(monkeypatch):
    from moeyard.cli.demo import obey
    from moeyard.lab import launch

    asked = []
    monkeypatch.setattr(launch, "labs", lambda: ["7", "8"])
    monkeypatch.setattr(launch.wire, "ask", lambda name, request: asked.append((name, request["order"])))
    for what in ("break", "slow", "mend"):
        obey({"what": what, "node": 0, "rail": 1, "factor": 0.5}, "8")
    assert asked == [("8", "break"), ("8", "slow"), ("8", "mend")]


def test_a_slow_order_keeps_nobody_from_the_page(tmp_path):
    from moeyard.live.server import Server

    obeyed = threading.Event()
    server = Server(tmp_path, order=lambda _: str(obeyed.wait(10)))
    threading.Thread(target=server.serve, daemon=True).start()
    own, said = f"http://127.0.0.1:{server.port}", []
    order = threading.Thread(
        target=lambda: said.append(ask(server, "/order", b"{}", X_Token=server.token, Origin=own))
    )
    order.start()
    assert ask(server, f"/state.json?token={server.token}")[0] == 200
    assert not said
    obeyed.set()
    order.join(10)
    assert said == [(200, '{"done": "True"}')]
    server.stop()


def test_a_run_that_was_here_before_that_says_nothing_more_or_is_gone(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder, step(0))
    (folder / "plain").mkdir()
    (folder / "plain" / "metrics.jsonl").write_text(json.dumps(step(3)))
    os.utime(folder / "moeyard" / "metrics.jsonl", (0, time.time() - 100))
    state = run_state(folder)
    assert [mode["name"] for mode in state["modes"]] == ["moeyard"]  # what options.json asks for
    assert 100 <= state["quiet_s"] < 200
    assert not state["gone"]
    shutil.rmtree(folder)
    state = run_state(folder)
    assert (state["gone"], state["modes"], state["quiet_s"]) == (True, [], None)


def test_an_empty_folder_has_a_state(tmp_path):
    assert run_state(tmp_path)["modes"] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from moeyard.cli.train import _watched

with _watched(Path(sys.argv[1])):
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a lab is Linux's, and so is death with the parent")
def test_the_page_of_a_training_that_is_killed_ends_with_it(tmp_path, root):
    training = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path],
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    address = training.stderr.readline()
    assert address.startswith("http://127.0.0.1:")
    # read until nobody has it open: the page is gone too
    assert training.communicate("\n", timeout=20)[1] == ""
    assert training.returncode == -signal.SIGKILL
