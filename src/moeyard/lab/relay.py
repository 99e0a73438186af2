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


def carry(one: socket.socket, other: socket.socket, seconds: float) -> None:
    """Between two ports, until killed."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        with contextlib.suppress(OSError):  # an ordinary user's relay is a little less punctual
            os.nice(-10)
    ports = (one, other)
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    held = [0, 0]
    while True:
        due = min((queue[0][0] for queue in waiting if queue), default=None)
        patience = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select(ports, [], [], patience)
        now = time.monotonic()
        for side in (0, 1):
            if ports[side] in ready:
                _take(ports[side], waiting[side], held, side, now + seconds)
            queue, out = waiting[side], ports[1 - side]
            while queue and queue[0][0] <= now:
                _, packet = queue.popleft()
                held[side] -= len(packet)
                with contextlib.suppress(OSError):  # a full or broken port drops, as a wire would
                    out.send(packet)


def _take(
    port: socket.socket, queue: deque[tuple[float, bytes]], held: list[int], side: int, due: float
) -> None:
    for _ in range(64):
        try:
            packet = port.recv(1 << 17)
        except BlockingIOError:
            return
        except OSError:  # the port went down
            return
        if held[side] + len(packet) <= _ROOM:
            queue.append((due, packet))
            held[side] += len(packet)
