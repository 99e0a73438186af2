"""Transports without ranks: what a wait promises, streams played by counters, state that is ready to travel."""

import pickle
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import moeyard as my  # noqa: E402
from moeyard.errors import InvalidCluster, UnknownName  # noqa: E402
from moeyard.runtime.agree.plans import Plan  # noqa: E402
from moeyard.runtime.block.compiled import outside_graphs  # noqa: E402
from moeyard.runtime.faults.errors import RankLost  # noqa: E402
from moeyard.runtime.layers.move import _about, _Rows, _Single  # noqa: E402
from moeyard.runtime.transport import nccl  # noqa: E402
from moeyard.runtime.transport.api import Bare, Deck, Pending  # noqa: E402
from moeyard.runtime.transport.channels import Port, _create_gloo  # noqa: E402
from moeyard.runtime.transport.family import TRANSPORTS, choose_transport  # noqa: E402
from moeyard.runtime.transport.launches import LANES  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(120)]


def test_a_failed_exchange_fails_at_every_wait():
    calls = []

    def finish():
        calls.append(1)
        raise RankLost("rank 1 is gone")

    pending = Pending(finish)
    for _ in range(3):
        with pytest.raises(RankLost, match="rank 1 is gone"):
            pending.wait()
    assert len(calls) == 1


def test_a_wait_that_was_interrupted_can_be_repeated():
    calls = []

    def finish():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    pending = Pending(finish)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.wait()
    pending.wait()
    assert len(calls) == 2


def test_a_group_whose_rank_never_connects_is_given_up(monkeypatch):
    """gloo waits 30 s for a rank that died after it had said where it listens, whatever the group's time-out."""
    ever = threading.Event()

    class Gloo:
        _Options = SimpleNamespace
        create_device = create_default_device = staticmethod(lambda **_: None)

        def __init__(self, *_):
            ever.wait(5)

    monkeypatch.setattr(torch.distributed.distributed_c10d, "ProcessGroupGloo", Gloo)
    asked = SimpleNamespace(timeout=timedelta(seconds=0.2), store=None, group_rank=0, group_size=2)
    with pytest.raises(RuntimeError, match=r"connecting a group: a rank did not answer within 1.2 s"):
        _create_gloo(asked, "never")
    ever.set()
    assert isinstance(_create_gloo(asked, "never"), Gloo)


def test_every_wait_joins_and_only_the_first_finishes():
    calls = []
    pending = Pending(lambda: calls.append("finish"), lambda: calls.append("join"))
    pending.wait()
    pending.wait()
    assert calls == ["finish", "join", "join"]


def test_a_transport_is_the_backends_own_or_the_one_named():
    assert choose_transport(None, "gloo").args[0] is TRANSPORTS["gloo"]
    assert choose_transport(None, "nccl").args[0] is TRANSPORTS["nccl"]
    for backend in ("gloo", "nccl"):
        assert choose_transport("collective", backend).args[0] is TRANSPORTS["collective"]
    with pytest.raises(UnknownName, match="did you mean 'collective'"):
        choose_transport("colective", "gloo")
    with pytest.raises(InvalidCluster, match="needs nccl groups, but the yard's are gloo"):
        choose_transport("nccl", "gloo")


class Stream:
    """Notes what it waits for."""

    def __init__(self, *_):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)

    def wait_event(self, event):
        self.waited.append(event)


class Event:
    def record(self, stream):
        self.stream = stream


class Work:
    """Of NCCL: a wait queues on whichever stream is current."""

    def __init__(self, ops):
        self.ops = ops

    def wait(self):
        Cuda.current.waited.append(self)


class Cuda:
    """Which stream is current, as torch.cuda.stream(...) sets it."""

    current = None

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before, Cuda.current = Cuda.current, self.stream

    def __exit__(self, *_):
        Cuda.current = self.before


class Channels:
    """Two ranks; a group for each lane."""

    def __init__(self):
        self.groups = self.lanes = [Group() for _ in range(LANES)]
        self.send_to = self.receive_from = [None, Port(self.groups[0], 1, 0)]


class Group:
    """Of NCCL: what is posted between two calls is one work."""

    def _start_coalescing(self, device):
        self.ops = []

    def send(self, data, peer, tag):
        self.ops.append(("send", self, *data))

    def recv(self, data, peer, tag):
        self.ops.append(("recv", self, *data))

    def _end_coalescing(self, device):
        return Work(self.ops)


class Guard:
    def __init__(self):
        self.noted = []

    def check_open(self):
        pass

    def note(self, work, what):
        self.noted.append(work)


@pytest.fixture
def streams(monkeypatch):
    """NcclStreams of rank 0 of 2 with the device played; messages are posted and never arrive."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Cuda.current)
    monkeypatch.setattr(Cuda, "current", Stream())
    return nccl.NcclStreams(Deck(0, torch.device("cpu"), None, Channels(), Guard()))


def two_ranks():
    port = my.Port(1e9, 1e-6)
    made = my.schedule(my.Cluster(2, 1, port, port), my.Traffic([[3, 2], [4, 0]], 8), "direct")
    return Plan(made, 0, 0)


def test_on_streams_a_wait_is_for_the_stream_that_waits(streams):
    starter, other, third = Cuda.current, Stream(), Stream()
    source, output = torch.arange(5.0).view(5, 1), torch.zeros(7, 1)
    plan = two_ranks()
    pending = streams.start(plan, False, output, source)
    begun = len(starter.waited)
    assert all(event.stream is starter for event in starter.waited)  # its own table
    assert len(streams.under_way) == 1
    Cuda.current = other
    pending.wait()
    (done,) = other.waited
    assert done.stream is streams.lanes[0]
    assert starter.waited[begun:] == [done]  # memory taken there is given back there
    assert streams.under_way == set()
    assert output[:3, 0].tolist() == [0, 1, 2]
    stages = [one for one in done.stream.waited if isinstance(one, Event)]
    assert len(stages) == len(plan.forward.steps) > 0
    works = [one for lane in streams.lanes for one in lane.waited if isinstance(one, Work)]
    assert sorted(op[0] for work in works for op in work.ops) == [
        "recv",
        "send",
    ]  # each waited for on its lane, once
    assert streams.deck.guard.noted == works
    Cuda.current = third
    pending.wait()
    assert third.waited == other.waited
    assert works == [one for lane in streams.lanes for one in lane.waited if isinstance(one, Work)]


def test_on_streams_what_a_plan_launches_is_kept_with_it(streams):
    plan = two_ranks()
    found = streams.known(plan, False)
    assert streams.known(plan, False) is found
    assert streams.known(plan, True) is not found


def test_on_streams_bare_messages_go_in_one_batch(streams):
    into, out = torch.zeros(4), torch.ones(4)
    arriving, leaving = streams.post([Bare(1, into)], [Bare(1, out)])
    assert arriving == leaving
    assert [op[0] for op in arriving[0].ops] == ["recv", "send"]
    assert streams.post([], [Bare(1, out)])[0] == []


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and cannot be pickled there."""

    @property
    def device(self):
        return torch.device("cuda", 3)

    def __reduce_ex__(self, protocol):
        raise AssertionError("pickled on its device")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_single_values_of_optimizer_state_travel_on_the_cpu():
    step = torch.tensor(7.0).as_subclass(OnDevice)
    found = pickle.loads(pickle.dumps(_Single.of(step)))
    assert found.value.device.type == "cpu"
    assert float(found.value) == 7.0
    assert found.on_device
    parameter = torch.zeros(2, device="meta")  # stands for the receiver's own device
    assert found.beside(parameter).device.type == "meta"
    plain = pickle.loads(pickle.dumps(_Single.of(torch.tensor(7.0))))
    assert plain.beside(parameter).device.type == "cpu"
    assert _Single.of(0.5).beside(parameter) == 0.5


def test_optimizer_state_is_rows_or_single_values():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 3, dtype=torch.bfloat16), "pair": (1, 2)}
    about = _about("experts.up", parameter, state)
    assert about["exp_avg"] == _Rows((3,), torch.bfloat16)
    assert isinstance(about["step"], _Single)
    assert about["pair"].beside(parameter) == (1, 2)
    with pytest.raises(my.errors.InvalidModel, match=r"experts.up: optimizer state 'odd' of shape \(3,\)"):
        _about("experts.up", parameter, {"odd": torch.zeros(3)})


def test_what_runs_outside_graphs_breaks_them():
    @outside_graphs
    def host(x):
        return x * int(x.sum().item() > 0)

    def around(x):
        return host(x + 1) + 1

    x = torch.ones(3)
    expected = around(x)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(around, backend=backend)(x), expected)
    assert len(graphs) == 2  # before and after, nothing of it
    torch.compiler.reset()  # else the broken graphs are used again
    with pytest.raises(Exception, match=r"(?i)disable"):
        torch.compile(around, backend=backend, fullgraph=True)(x)
