"""Transfer tables: int64 arrays [transfer, (stage, src, dst, origin, target, start, rows)].

Called by `Schedule` and the forms; sorting is counting, column by column from the last to the first, each pass stable.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel

STAGE, SRC, DST, ORIGIN, TARGET, START, ROWS = range(7)


@kernel
def _stable_pass(table, order, column, buckets):
    """`order` re-ordered so that table[order, column] ascends; equal keys keep their order."""
    place = np.zeros(buckets + 1, np.int64)
    for i in range(len(table)):
        place[table[i, column] + 1] += 1
    for b in range(buckets):
        place[b + 1] += place[b]
    sorted_ = np.empty(len(order), np.int64)
    for i in order:
        key = table[i, column]
        sorted_[place[key]] = i
        place[key] += 1
    return sorted_


@kernel
def _gathered(table, order):
    out = np.empty_like(table)
    for i in range(len(order)):
        for c in range(table.shape[1]):
            out[i, c] = table[order[i], c]
    return out


@kernel
def sort_messages(table, stages, ranks, peer):
    """One rank's transfers sorted by (stage, peer column), stable: those of a message keep the order they came in."""
    order = _stable_pass(table, np.arange(len(table)), peer, ranks)
    return _gathered(table, _stable_pass(table, order, STAGE, stages))


def sort_transfers(table: np.ndarray, stages: int, ranks: int) -> np.ndarray:
    """Sorted by (stage, src, dst, origin, target, start): messages in stage order, rows in wire order."""
    # starts have no small bound to count by, and sorting in numpy costs nothing to compile
    order = np.argsort(table[:, START], kind="stable")
    return _by_columns(table, order, stages, ranks)


@kernel
def _by_columns(table, order, stages, ranks):
    """The transfers in `order`, stably sorted by (stage, src, dst, origin, target)."""
    for column, buckets in ((TARGET, ranks), (ORIGIN, ranks), (DST, ranks), (SRC, ranks), (STAGE, stages)):
        order = _stable_pass(table, order, column, buckets)
    return _gathered(table, order)


@kernel
def by_payload(table, ids, ranks):
    """`ids` of table rows sorted by (origin, target, start)."""
    for column in (TARGET, ORIGIN):
        place = np.zeros(ranks + 1, np.int64)
        for i in ids:
            place[table[i, column] + 1] += 1
        for r in range(ranks):
            place[r + 1] += place[r]
        sorted_ = np.empty_like(ids)
        for i in ids:
            sorted_[place[table[i, column]]] = i
            place[table[i, column]] += 1
        ids = sorted_
    for n in range(1, len(ids)):  # rows of a block mostly come in order already
        i = ids[n]
        at = n
        while at > 0:
            j = ids[at - 1]
            if (
                table[j, ORIGIN] != table[i, ORIGIN]
                or table[j, TARGET] != table[i, TARGET]
                or table[j, START] <= table[i, START]
            ):
                break
            ids[at] = j
            at -= 1
        ids[at] = i
    return ids


@kernel
def flipped(table, stages, ranks):
    """The same hops the other way round, last stage first; sorted by (stage, src, dst, origin, target, start)."""
    out = np.empty_like(table)
    for i in range(len(table)):
        out[i, STAGE], out[i, START], out[i, ROWS] = (
            stages - 1 - table[i, STAGE],
            table[i, START],
            table[i, ROWS],
        )
        out[i, SRC], out[i, DST] = table[i, DST], table[i, SRC]
        out[i, ORIGIN], out[i, TARGET] = table[i, TARGET], table[i, ORIGIN]
    order = by_payload(out, np.arange(len(out)), ranks)
    for column, buckets in ((DST, ranks), (SRC, ranks), (STAGE, stages)):
        order = _stable_pass(out, order, column, buckets)
    return _gathered(out, order)


@kernel
def merge_messages(table):
    """[message, (stage, src, dst, rows)] of a table sorted by message."""
    out = np.empty((len(table), 4), np.int64)
    n = 0
    for i in range(len(table)):
        stage, src, dst = table[i, STAGE], table[i, SRC], table[i, DST]
        if n == 0 or stage != out[n - 1, 0] or src != out[n - 1, 1] or dst != out[n - 1, 2]:
            out[n, 0], out[n, 1], out[n, 2], out[n, 3] = stage, src, dst, 0
            n += 1
        out[n - 1, 3] += table[i, ROWS]
    return out[:n].copy()


@kernel
def inverted_after(ptr, after):
    """CSR of the DAG with every edge turned round and stages numbered from the end."""
    stages = len(ptr) - 1
    out_ptr = np.zeros(stages + 1, np.int64)
    for q in after:
        out_ptr[stages - 1 - q + 1] += 1
    for s in range(stages):
        out_ptr[s + 1] += out_ptr[s]
    place = out_ptr[:-1].copy()
    out = np.empty(len(after), np.int64)
    for s in range(stages - 1, -1, -1):  # descending, so that the new names ascend
        for e in range(ptr[s], ptr[s + 1]):
            q = stages - 1 - after[e]
            out[place[q]] = stages - 1 - s
            place[q] += 1
    return out_ptr, out
