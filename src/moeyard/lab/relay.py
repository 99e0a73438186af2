"""A wire with a delay, in user space: for wan links where the kernel has no netem.

Packets are taken from one port and put out of the other `seconds` later. Each comes with the kernel's own header
(PACKET_VNET_HDR), so large ones pass whole and checksums stay offloaded.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_ALL = 0x0003
_ROOM = 64 << 20  # bytes that may be under way in each direction


def open_port(name: str) -> socket.socket:
    """All that arrives at an interface, in the network namespace of the caller."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    port.bind((name, _ALL))  # in host order: bind turns it
    port.setblocking(False)
    return port


class Wire(NamedTuple):
    """Two ports, and the seconds from one to the other."""

    one: socket.socket
    other: socket.socket
    seconds: float


class _Way:
    """One direction of a wire: what is under way, by when it is due."""

    def __init__(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        self.source, self.target, self.seconds = source, target, seconds
        self.queue: deque[tuple[float, bytes]] = deque()
        self.held = 0

    def take(self, due: float) -> None:
        for _ in range(64):
            try:
                packet = self.source.recv(1 << 17)
            except OSError:  # no more for now, or the port went down
                return
            if self.held + len(packet) <= _ROOM:
                self.queue.append((due, packet))
                self.held += len(packet)

    def give(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            _, packet = self.queue.popleft()
            self.held -= len(packet)
            with contextlib.suppress(OSError):  # a full or broken port drops, as a wire would
                self.target.send(packet)


def carry(wires: Sequence[Wire]) -> None:
    """Along all of these, until killed."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        with contextlib.suppress(OSError):  # an ordinary user's relay is a little less punctual
            os.nice(-10)
    ways = {}
    for one, other, seconds in wires:
        ways[one], ways[other] = _Way(one, other, seconds), _Way(other, one, seconds)
    while True:
        due = min((way.queue[0][0] for way in ways.values() if way.queue), default=None)
        patience = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select(ways, [], [], patience)
        now = time.monotonic()
        for port in ready:
            ways[port].take(now + ways[port].seconds)
        for way in ways.values():
            way.give(now)
