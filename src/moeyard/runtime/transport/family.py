"""The ways that rows can take, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moeyard.errors import InvalidCluster, UnknownName
from moeyard.runtime.transport.api import Deck, Transport
from moeyard.runtime.transport.collective import Collective
from moeyard.runtime.transport.gloo import GlooThreads
from moeyard.runtime.transport.nccl import NcclStreams
from moeyard.runtime.transport.timed import Timed

TRANSPORTS: dict[str, Callable[[Deck], Transport]] = {
    "gloo": GlooThreads,
    "nccl": NcclStreams,
    "collective": Collective,
}


def choose_transport(name: str | None, backend: str) -> partial[Transport]:
    """The one named, or the backend's own."""
    name = name or backend
    if name not in TRANSPORTS:
        raise UnknownName.of("transport", name, TRANSPORTS)
    if name not in (backend, "collective"):
        raise InvalidCluster(
            f"transport {name!r} needs {name} groups, but the yard's are {backend}; leave it out, or take 'collective'"
        )
    return partial(_make, TRANSPORTS[name], name != "collective")


def _make(kind: Callable[[Deck], Transport], counts: bool, deck: Deck) -> Transport:
    if deck.watcher is None or deck.device.type == "cpu":
        return kind(deck)
    return Timed(kind(deck), deck.watcher, counts=counts)
