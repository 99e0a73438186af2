"""A program as the runtime walks it: neighbouring runs joined, what is packed elsewhere, stages in chains.

Called by `runtime.agree.plans`. S own stages, M messages, runs by pointer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import kernel


class Joined(NamedTuple):
    """Runs of message m: [ptr_M[m], ptr_M[m + 1]); where it is packed, or -1; all rows that are packed."""

    ptr_M: np.ndarray
    runs: np.ndarray  # [(space, first row, rows), run]
    staged_M: np.ndarray
    staged: np.int64


@kernel
def join_runs(run_ptr, space, offset, length, rows_M):
    """Runs of a message that lie one after another are one; a message of several runs is packed, one after another."""
    messages = len(rows_M)
    ptr, staged_M = np.zeros(messages + 1, np.int64), np.empty(messages, np.int64)
    runs = np.empty((3, len(space)), np.int64)
    n, staged = np.int64(0), np.int64(0)
    for m in range(messages):
        first = n
        for i in range(run_ptr[m], run_ptr[m + 1]):
            if n > first and runs[0, n - 1] == space[i] and runs[1, n - 1] + runs[2, n - 1] == offset[i]:
                runs[2, n - 1] += length[i]
                continue
            runs[0, n], runs[1, n], runs[2, n] = space[i], offset[i], length[i]
            n += 1
        ptr[m + 1] = n
        staged_M[m] = -1
        if n - first > 1:
            staged_M[m] = staged
            staged += rows_M[m]
    return Joined(ptr, runs[:, :n], staged_M, staged)


@kernel
def chain_stages(after_ptr, after, scale_out_S, most):
    """[stage] the chain it is walked in, -1 for a stage that waits for none.

    A stage joins a chain that ends in one that it waits for, of several one of its own network, then the one that ends last. If there is
    none it begins one; beyond `most` chains it joins any, by the same preference.
    """
    stages = len(scale_out_S)
    chain = np.full(stages, -1, np.int64)
    last = np.empty(most, np.int64)
    chains = 0
    for s in range(stages):
        if after_ptr[s] == after_ptr[s + 1]:
            continue
        best, fits, alike = -1, False, False
        for c in range(chains):
            waits = False
            for i in range(after_ptr[s], after_ptr[s + 1]):
                waits = waits or after[i] == last[c]
            if not waits and (fits or chains < most):
                continue
            same = scale_out_S[last[c]] == scale_out_S[s]
            if (
                best < 0
                or (waits and not fits)
                or (same and not alike)
                or (same == alike and last[c] > last[best])
            ):
                best, fits, alike = c, waits, same
        if best < 0:
            best = chains
            chains += 1
        chain[s] = best
        last[best] = s
    return chain
