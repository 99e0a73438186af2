"""The first process of a lab: starts the ranks, passes on what they print, answers requests, ends them together."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moeyard.errors import MoeyardError
from moeyard.lab import ranks, relay, spaces, wire
from moeyard.lab.network import Network
from moeyard.lab.spec import LabSpec

TIMED_OUT = 124
_TERM = 2.0  # seconds between asking a rank to end and ending it


class Stopped(BaseException):
    """A signal asked us to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Rank:
    number: int
    process: int  # its id
    line: socket.socket  # for its requests
    result: int  # a file in memory
    handle: int = -1  # readable when it has ended
    code: int | None = None  # exit status; 128 + signal if killed
    pipes: dict[int, bytes] = field(default_factory=dict)  # reading end -> unfinished line


class Watch:
    """One job in one lab."""

    def __init__(
        self, job: dict[str, Any], spec: LabSpec, network: Network | None, server: socket.socket
    ) -> None:
        self.job, self.spec, self.network, self.server = job, spec, network, server
        self.ranks: list[Rank] = []
        self.end: float | None = None  # when the ranks that still run are ended
        self.code = 0
        self.later: list[tuple[float, Callable[[], None]]] = []  # what is mended when
        self.select = selectors.DefaultSelector()

    def run(self) -> int:
        """The job's exit status: that of the first rank that failed."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        try:
            ranks.prepare(self.spec.cluster, kernels=self.job["warm"], modules=self.job["modules"])
            self._start_relays()
            for rank in range(self.spec.cluster.num_ranks):
                self._start(rank)
            self._loop()
        except Stopped as stopped:
            self.code = 128 + stopped.number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._end_all()
        self._deliver()
        return self.code

    # starting

    def _start_relays(self) -> None:
        for wires in self.network.wires if self.network else ():
            if wires and os.fork() == 0:
                try:
                    spaces.die_with_parent()
                    _forget_signals()
                    relay.carry(wires)
                finally:
                    os._exit(1)

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        result = os.memfd_create(f"result{number}")
        raw = self.job["show"] == "first" and number == 0
        pipes = [] if raw else [os.pipe(), os.pipe()]
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            spaces.die_with_parent()
            _forget_signals()
            os.setsid()
            for target, (read, write) in zip((1, 2), pipes, strict=False):
                os.close(read)
                os.dup2(write, target)
            ranks.be(number, self.job, self.spec, self.network, theirs, result)
        theirs.close()
        rank = Rank(number, child, ours, result)
        self.ranks.append(rank)
        for target, (read, write) in zip((1, 2), pipes, strict=False):
            os.close(write)
            rank.pipes[read] = b""
            self._watch(read, partial(self._print, rank, read, target))
        rank.handle = os.pidfd_open(child)
        self._watch(rank.handle, partial(self._reap, rank))
        self._watch(ours, partial(self._answer, ours))

    def _watch(self, file: Any, action: Callable[[], Any]) -> None:
        self.select.register(file, selectors.EVENT_READ, action)

    # watching

    def _loop(self) -> None:
        self._watch(self.server, self._accept)
        limit = self.job["timeout"]
        last = None if limit is None else time.monotonic() + limit
        while any(rank.code is None for rank in self.ranks):
            ends = [end for end in (self.end, last, *(when for when, _ in self.later)) if end is not None]
            patience = max(0.0, min(ends) - time.monotonic()) if ends else None
            for key, _ in self.select.select(patience):
                key.data()
            now = time.monotonic()
            self._act_later(now)
            if last is not None and now >= last:
                self.code = self.code or TIMED_OUT
                self._say(f"moeyard lab: not done after {limit:g} s; ending all ranks")
                return
            if self.end is not None and now >= self.end:
                return

    def _act_later(self, now: float) -> None:
        due = [act for when, act in self.later if when <= now]
        self.later = [(when, act) for when, act in self.later if when > now]
        for act in due:
            act()

    def _reap(self, rank: Rank) -> None:
        if rank.code is not None:
            return
        gone, status = os.waitpid(rank.process, os.WNOHANG)
        if not gone:
            return
        self.select.unregister(rank.handle)  # it would stay readable
        os.close(rank.handle)
        _signal_group(rank.process, signal.SIGKILL)  # what it left running
        code = os.waitstatus_to_exitcode(status)
        rank.code = code if code >= 0 else 128 - code
        self._drain(rank)
        if rank.code and not self.code:
            self.code, patience = rank.code, self.job["grace"]
            self.end = time.monotonic() + patience
            how = f"was killed by signal {-code}" if code < 0 else f"failed with status {code}"
            self._say(
                f"moeyard lab: rank {rank.number} {how}; the others have {patience:g} s to end by themselves"
            )

    def _print(self, rank: Rank, read: int, target: int) -> None:
        try:
            data = os.read(read, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            if rank.pipes[read]:
                self._write(rank, rank.pipes[read], target)
                rank.pipes[read] = b""
            self.select.unregister(read)
            os.close(read)
            del rank.pipes[read]
            return
        *lines, rank.pipes[read] = (rank.pipes[read] + data).split(b"\n")
        for line in lines:
            self._write(rank, line, target)

    def _write(self, rank: Rank, line: bytes, target: int) -> None:
        stream = sys.stdout if target == 1 else sys.stderr
        try:
            stream.buffer.write(b"[rank %d] %s\n" % (rank.number, line))
            stream.flush()
        except BrokenPipeError:  # nobody reads any more
            raise Stopped(signal.SIGPIPE) from None

    def _drain(self, rank: Rank) -> None:
        """What a rank wrote before it ended. Its own children may still hold the pipe."""
        for read in list(rank.pipes):
            os.set_blocking(read, False)
            target = self._target(rank, read)
            for _ in range(1000):
                if read not in rank.pipes:
                    break
                before = rank.pipes[read]
                self._print(rank, read, target)
                if rank.pipes.get(read) == before:
                    break

    def _target(self, rank: Rank, read: int) -> int:
        return 1 if read == min(rank.pipes) and len(rank.pipes) > 1 else 2

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # requests

    def _accept(self) -> None:
        peer, _ = self.server.accept()
        if wire.allowed(peer):
            peer.setblocking(True)
            self._watch(peer, partial(self._answer, peer))
        else:
            peer.close()

    def _answer(self, line: socket.socket) -> None:
        try:
            text = line.recv(1 << 16)
        except OSError:
            text = b""
        if not text:
            self._hang_up(line)
            return
        try:
            reply = {"value": self._obey(json.loads(text))}
        except (MoeyardError, ValueError, KeyError, TypeError) as error:
            reply = {"error": str(error)}
        try:
            line.send(json.dumps(reply).encode())
        except OSError:  # whoever asked has not waited; the ranks have nothing to do with it
            self._hang_up(line)

    def _hang_up(self, line: socket.socket) -> None:
        self.select.unregister(line)
        line.close()

    def _obey(self, request: dict[str, Any]) -> Any:
        order = request.get("order")
        if order == "describe":
            return {
                "name": self.job["name"],
                "shaped": self.network is not None,
                "spec": json.loads(self.spec.to_json()),
                "ranks": {rank.number: rank.process for rank in self.ranks},
                "target": self.job["target"],
            }
        if self.network is None:
            raise MoeyardError("this lab is unshaped, on loopback: it has no rails to change")
        if order == "sent":
            return self.network.sent()
        if order == "sent-wan":
            return self.network.sent_wan()
        return self._change(self.network, str(order), request)

    def _change(self, network: Network, order: str, request: dict[str, Any]) -> None:
        """Break, slow or mend a rail or a datacenter's wan; what is broken for some seconds is mended here."""
        if "wan" in request:
            where: tuple[int, ...] = (int(request["wan"]),)
            ways: dict[str, Callable[..., None]] = {
                "break": network.cut_wan, "slow": network.slow_wan, "mend": network.mend_wan,
            }  # fmt: skip
        else:
            where = (int(request["node"]), int(request["rail"]))
            ways = {"break": network.cut, "slow": network.slow, "mend": network.mend}
        if order not in ways:
            raise MoeyardError(f"unknown order {order!r}")
        seconds, after = request.get("seconds"), float(request.get("after") or 0.0)
        if seconds is not None and not 0 < float(seconds) < 1e6:
            raise MoeyardError(
                f"seconds must be above 0 and below a million, got {seconds!r}; leave them out to break for good"
            )
        act = partial(ways[order], *where, *([float(request["factor"])] if order == "slow" else []))
        now = time.monotonic()
        if after > 0:
            self.later.append((now + after, act))
        else:
            act()
        if seconds is not None and order != "mend":
            self.later.append((now + after + float(seconds), partial(ways["mend"], *where)))

    # ending

    def _end_all(self) -> None:
        for number, patience in ((signal.SIGTERM, _TERM), (signal.SIGKILL, 5.0)):
            left = [rank for rank in self.ranks if rank.code is None]
            for rank in left:
                _signal_group(rank.process, number)
            end = time.monotonic() + patience
            while left and time.monotonic() < end:
                for rank in left:
                    self._reap(rank)
                left = [rank for rank in left if rank.code is None]
                time.sleep(0.01)

    def _deliver(self) -> None:
        """Results of the ranks, to whoever called."""
        if self.job["results"] is None:
            return
        results = []
        for rank in self.ranks:
            with os.fdopen(rank.result, "rb") as file:
                file.seek(0)
                results.append((rank.code, file.read()))
        with os.fdopen(self.job["results"], "wb") as out:
            pickle.dump(results, out)


def _stop(number: int, _: Any) -> None:
    raise Stopped(number)


def _forget_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _signal_group(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, number)
