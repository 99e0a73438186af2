"""How one speaks to a running lab: JSON lines over a socket that has no file.

The socket's name lives in the kernel alone and goes with the lab. Only the lab's own user is heard.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

PREFIX = "moeyard-lab/"
ENV_FD = "MOEYARD_LAB_FD"


def listen(name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    server.bind(f"\0{PREFIX}{name}")
    server.listen(8)
    return server


def allowed(peer: socket.socket) -> bool:
    """Is the other end this user? (In a user namespace of our own that user is root, and others are nobody.)"""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def running() -> list[str]:
    """Names of the labs on this machine."""
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        path = line.split()[-1]
        if path.startswith(f"@{PREFIX}"):
            found.add(path.removeprefix(f"@{PREFIX}"))
    return sorted(found)


def ask(name: str, request: dict[str, Any], timeout: float = 10.0) -> Any:
    """The answer of a running lab. Raises OSError if it is not there, ValueError with its words if it refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(timeout)
        client.connect(f"\0{PREFIX}{name}")
        return _talk(client, request)


def ask_from_rank(request: dict[str, Any], timeout: float = 10.0) -> Any:
    """The same, from a rank of the lab, which has a line of its own."""
    with socket.socket(fileno=os.dup(int(os.environ[ENV_FD]))) as client:
        client.settimeout(timeout)
        return _talk(client, request)


def _talk(client: socket.socket, request: dict[str, Any]) -> Any:
    client.send(json.dumps(request).encode())
    reply = json.loads(client.recv(1 << 20) or b'{"error": "the lab closed the line"}')
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["value"]
