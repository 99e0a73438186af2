"""A connection of one's own to the store that a job has."""

from __future__ import annotations

import os
import uuid
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from moeyard.runtime.faults.verdict import store_lost
from moeyard.runtime.faults.within import within

_LONGEST = 10.0  # seconds for a new connection


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
    try:
        if clone is not None:  # a new connection; it would be tried for as long as the store's own time-out
            return within(_LONGEST, clone)  # type: ignore[no-any-return]
        if isinstance(inner, TCPStore):
            return within(_LONGEST, lambda: second_client(store, inner, rank, first))
    except Exception as error:
        raise store_lost(f"rank {rank}, making a yard", error, keeper_of(store)) from error
    return store


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
