"""Roll calls and verdicts: ranks are threads of one process here, each with a client of its own to a store."""

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import PrefixStore  # noqa: E402

from moeyard.runtime.agree.floor import CALLS, Floor, Roll  # noqa: E402
from moeyard.runtime.faults.client import keeper_of, own_client, second_client  # noqa: E402
from moeyard.runtime.faults.errors import Mismatch, RankLost  # noqa: E402
from moeyard.runtime.faults.guard import Guard, longest_wait, patience  # noqa: E402
from moeyard.runtime.faults.verdict import IDLE  # noqa: E402
from moeyard.runtime.faults.vigil import Vigil  # noqa: E402
from moeyard.runtime.transport.behind import BehindThread  # noqa: E402
from moeyard.runtime.transport.channels import abort_groups, make_group  # noqa: E402
from moeyard.runtime.transport.light import Light  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(120)]
LONG = timedelta(seconds=20)


def test_a_named_error_comes_within_the_time_out():
    for timeout in (20.0, 60.0, 300.0):
        assert longest_wait(timeout) + patience(timeout) < timeout
    assert longest_wait(5.0) == 5.0


class Ranks:
    """Guards of `count` ranks in this process."""

    def __init__(self, clients, timeout=5.0):
        self.guards = [
            Guard(client, rank, range(len(clients)), timeout, False) for rank, client in enumerate(clients)
        ]

    def close(self):
        for guard in self.guards:
            guard.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(params=["tcp", "file"])
def clients(request, tmp_path):
    """One for each of three ranks, as a yard makes them: the store that the rank uses, and the watch's own."""
    if request.param == "file":
        stores = [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    else:
        port = free_port()
        stores = [
            dist.TCPStore("127.0.0.1", port, None, rank == 0, LONG, wait_for_workers=False)
            for rank in range(3)
        ]
    stores = [PrefixStore("yard", store) for store in stores]
    return [(store, own_client(store, rank, 0)) for rank, store in enumerate(stores)]


def test_a_rank_that_waits_for_a_key_answers_the_roll_call(clients):
    """With the rank's own client it would answer when the wait is over, and be called gone."""
    ranks = Ranks([own for _, own in clients])
    stuck = threading.Thread(target=lambda: _refused(clients[1][0]))
    stuck.start()
    time.sleep(0.2)
    ranks.guards[2].close()  # this one is gone
    error = ranks.guards[0].lost("silence")
    assert stuck.is_alive()
    assert error.ranks == (2,)
    stuck.join()
    ranks.close()


def _refused(store):
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=6))


def test_the_first_verdict_is_everyones(clients):
    """Rank 0 leaves after its error; rank 1, which then misses rank 0 too, names rank 0's culprit."""
    ranks = Ranks([own for _, own in clients])
    ranks.guards[2].close()
    assert ranks.guards[0].lost("silence").ranks == (2,)
    ranks.guards[0].close()
    error = ranks.guards[1].lost("connection closed by rank 0")
    assert error.ranks == (2,)
    assert "as rank 0 found: silence" in str(error)
    ranks.close()


def test_a_late_rank_is_named_and_told(clients):
    ranks = Ranks([own for _, own in clients])
    for guard in ranks.guards[:2]:
        guard.where.enter("dispatch")
    assert ranks.guards[0].lost("silence").ranks == (2,)
    late = ranks.guards[2].lost("everyone has gone")
    assert late.ranks == (2,)
    with pytest.raises(RankLost, match="of no use") as caught:
        ranks.guards[2].watched("dispatch", lambda: None)
    assert caught.value.ranks == (2,)
    ranks.close()


def test_a_backends_error_becomes_ours(clients):
    ranks = Ranks([own for _, own in clients])

    def fails():
        raise RuntimeError("Connection closed by peer")

    ranks.guards[1].close()
    with pytest.raises(RankLost, match=r"loss\)?.*Connection closed by peer") as caught:
        ranks.guards[0].watched("loss", fails)
    assert caught.value.ranks == (1,)
    with pytest.raises(ValueError, match="mine"):  # what is not between ranks stays what it is
        ranks.guards[2].watched("loss", lambda: _raise(ValueError("mine")))
    ranks.close()


def test_who_waits_for_a_gather_behind_the_training_is_not_elsewhere(clients):
    """A rail dies under an exchange of rows and under a gather behind it: rank 1 has its rows and waits for the gather."""
    ranks = Ranks([own for _, own in clients])
    for guard in ranks.guards:
        guard.where.enter("an exchange")
    waits = ranks.guards[1]
    waits.where.go()
    behind = BehindThread(SimpleNamespace(deck=SimpleNamespace(guard=waits), light=Light()))

    def gather(_):
        end = time.monotonic() + 5.0
        while waits.where.state == IDLE and time.monotonic() < end:
            time.sleep(0.01)
        raise waits.lost("silence")

    try:
        with pytest.raises(RankLost) as caught:
            behind.submit(gather).wait()
        assert caught.value.ranks == ()
        assert ranks.guards[0].lost("silence").ranks == ()
    finally:
        behind.close()
        ranks.close()


def _raise(error):
    raise error


def test_who_fails_behind_the_training_is_to_blame_though_nobody_waited_there(clients):
    """The others wait for its part, and where it goes on meanwhile says nothing."""
    ranks = Ranks([own for _, own in clients])
    fails = ranks.guards[1]
    behind = BehindThread(SimpleNamespace(deck=SimpleNamespace(guard=fails), light=Light()))
    behind.submit(lambda _: _raise(Mismatch("of all ranks, and all parts are done", [0])))
    behind.thread.submit(lambda: None).result()
    assert fails.in_peace
    behind.submit(lambda _: _raise(MemoryError("no room for the replicas")))
    behind.close()
    with pytest.raises(RankLost, match="rank 1 failed behind the training: MemoryError: no room") as caught:
        fails.watched("dispatch", lambda: None)
    assert caught.value.ranks == (1,)
    error = ranks.guards[0].lost("silence")
    assert error.ranks == (1,)
    assert "no room for the replicas (here: silence)" in str(error)
    ranks.close()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_the_keeper_of_the_store_is_named(how, monkeypatch):
    """Stopped it never answers, whatever the client's time-out; killed it answers with an error."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_port()
    keeper = os.fork()
    if keeper == 0:
        kept = dist.TCPStore("127.0.0.1", port, None, True, LONG, wait_for_workers=False)  # noqa: F841
        time.sleep(60)
        os._exit(0)
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)
        guard = Guard(own_client(store, 1, 0), 1, range(2), 5.0, False)
        os.kill(keeper, how)
        time.sleep(0.3)
        began = time.monotonic()
        error = guard.lost("silence")
        assert error.ranks == (0,)
        assert "rank 0, which keeps it" in str(error)
        assert time.monotonic() - began < 2 * patience(5.0) + 2
        guard.close()
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def test_torchruns_agent_keeps_the_store(clients, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert keeper_of(clients[0][0]) is None


def test_a_second_connection_without_clones():
    port = free_port()
    master = dist.TCPStore("127.0.0.1", port, None, True, LONG, wait_for_workers=False)
    stores = [
        PrefixStore("a", master),
        PrefixStore("a", dist.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)),
    ]
    one, other = (second_client(store, store.underlying_store, rank, 0) for rank, store in enumerate(stores))
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert not stores[0].check(["key"])


class Backend:
    """Plays NCCL's: an abort is over when no kernel runs on the device, and one of each group does until that group is aborted."""

    def __init__(self, running, name, fails=False):
        self.running, self.name, self.fails = running, name, fails

    def abort(self):
        if self.fails:
            self.running.discard(self.name)
            raise RuntimeError("aborted already")
        self.running.discard(self.name)
        end = time.monotonic() + 2
        while self.running and time.monotonic() < end:
            time.sleep(0.01)


def test_all_groups_of_a_device_are_aborted_together():
    running = {0, 1, 2, 3}
    backends = [Backend(running, name, fails=name == 1) for name in range(4)]
    groups = [SimpleNamespace(_get_backend=lambda device, one=one: one) for one in backends]
    began = time.monotonic()
    abort_groups(groups, torch.device("cpu"))
    abort_groups([], torch.device("cpu"))
    assert running == set()
    assert time.monotonic() - began < 1.5


def test_torchs_watchdog_leaves_our_groups_alone(monkeypatch):
    """It would end the process unnamed, and before that sleep with a lock that the next exchange waits for."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    monkeypatch.setenv(names[0], "3")
    monkeypatch.delenv(names[1], raising=False)
    seen = []
    monkeypatch.setattr(
        dist, "new_group", lambda *_, **named: seen.append([os.environ.get(name) for name in names])
    )
    make_group([0, 1], "nccl", 5.0)
    make_group([0, 1], "gloo", 5.0)
    assert seen == [["0", "0"], ["3", None]]
    assert [os.environ.get(name) for name in names] == ["3", None]


class Work:
    """Of a device: under way until told otherwise."""

    def __init__(self):
        self.done, self.result = False, torch.futures.Future()

    def is_completed(self):
        return self.done

    def end(self, result):
        self.done = True
        self.result.set_result(result)

    def get_future_result(self):
        return self.result


def test_the_vigil_tells_of_works_that_do_not_end_or_fail():
    told = []
    vigil = Vigil(0.3, told.append, period=0.02)
    first, second = Work(), Work()
    vigil.note(first, "an exchange")
    vigil.note(second, "sync_gradients")
    first.end(0)
    time.sleep(0.15)
    assert told == []
    time.sleep(0.4)
    assert len(told) == 1
    assert told[0].startswith("sync_gradients: not done on the device after 0.")
    vigil.close()
    vigil = Vigil(30, told.append, period=0.02)
    third = Work()
    vigil.note(third, "an exchange")
    third.done = True
    time.sleep(0.1)
    assert told[1:] == []
    third.end(2)
    time.sleep(0.2)
    assert told[1:] == ["an exchange: the backend gave up on it (result 2)"]
    vigil.close()


def test_no_work_is_asked_while_groups_are_aborted(clients):
    """Its answer would wait for the abort, and hold up all threads meanwhile."""
    ranks = Ranks([own for _, own in clients], timeout=1.0)
    asked, during = [0], []

    class Asked(Work):
        def is_completed(self):
            asked[0] += 1
            return False

    def abort():
        before = asked[0]
        time.sleep(0.6)
        during.append((before, asked[0]))

    ranks.guards[1].keep_vigil(abort)
    ranks.guards[0].keep_vigil(lambda: None)
    ranks.guards[2].close()
    ranks.guards[0].note(Work(), "sync_gradients")
    time.sleep(0.5)
    ranks.guards[1].note(
        Asked(), "an exchange"
    )  # younger: rank 1 hears the verdict before its own is overdue
    end = time.monotonic() + 10
    while not during and time.monotonic() < end:
        time.sleep(0.05)
    ((before, after),) = during
    assert before == after > 0
    ranks.close()


def test_groups_on_a_device_are_aborted_by_whoever_hears_first(clients):
    """Rank 0's work does not end, so it calls the roll; rank 1, which waits for its device, is told by the verdict."""
    ranks = Ranks([own for _, own in clients], timeout=1.0)
    aborted = []
    for rank, guard in enumerate(ranks.guards[:2]):
        guard.keep_vigil(lambda rank=rank: aborted.append(rank))
    ranks.guards[2].close()
    ranks.guards[0].note(Work(), "sync_gradients")
    end = time.monotonic() + 10
    while len(aborted) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert sorted(aborted) == [0, 1]
    for guard in ranks.guards[:2]:
        with pytest.raises(RankLost, match="of no use") as caught:
            guard.watched("dispatch", lambda: None)
        assert caught.value.ranks == (2,)
    ranks.close()


def roll(said):
    """As if `said` were what the ranks of a world 4, 5, 6, ... gathered."""
    said = np.array(said)
    control = SimpleNamespace(ranks=range(4, 4 + len(said)), gather=lambda mine: said)
    return Roll(control)


def test_who_comes_for_another_call_is_named():
    sync, loss = CALLS.index("sync_gradients"), CALLS.index("loss")
    Floor("loss", None, None, roll([[loss, 1, 9]] * 3)).meet()
    with pytest.raises(Mismatch, match="sync_gradients and loss; nothing was sent") as caught:
        Floor("loss", None, None, roll([[sync, 1, 9], [loss, 1, 9], [sync, 1, 9]])).meet()
    assert caught.value.ranks == (5,)
    with pytest.raises(Mismatch, match="what loss is for") as caught:
        Floor("loss", None, None, roll([[loss, 1, 9], [loss, 1, 8]])).meet()
    assert caught.value.ranks == (4, 5)
