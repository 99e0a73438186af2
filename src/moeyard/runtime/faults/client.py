"""A connection of one's own to the store that a job has."""

from __future__ import annotations

import os
import uuid
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore


def innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def own_client(store: Store, rank: int, first: int) -> Store:
    """The same keys by a connection of one's own: a TCPStore's client does one thing at a time, and a wait on it lasts until
    the key is there or the time-out is over. A FileStore opens its file for each operation, so it is shared as it is.

    Every rank calls this at the same point; `first` is one of them, the same on all.
    """
    inner = innermost(store)
    if isinstance(inner, FileStore):
        return store
    clone: Any = getattr(store, "clone", None)
    if clone is not None:
        return clone()  # type: ignore[no-any-return]
    return second_client(store, inner, rank, first) if isinstance(inner, TCPStore) else store


def second_client(store: Store, inner: TCPStore, rank: int, first: int) -> Store:
    """For a torch whose stores cannot be cloned. Prefixes cannot be asked for, so the ranks take a new one of their own."""
    if rank == first:
        store.set("client", uuid.uuid4().hex)
    name = store.get("client").decode()
    client = TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False)
    return PrefixStore(name, client)


def keeper_of(store: Store) -> int | None:
    """The rank of the world whose end is the store's end: rank 0 for a TCPStore, unless torchrun's agent keeps it."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return 0 if isinstance(innermost(store), TCPStore) and not agent else None
