"""Small gathers between ranks before rows move: counts, order of calls, plan digests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moeyard.arrays import IntArray
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.faults.errors import Mismatch
from moeyard.runtime.faults.flaws import Flaw
from moeyard.runtime.faults.verdict import PLAN

# The frame that every call gathers. Fields before `flaw` must be equal on all ranks.
FIELDS = ("kind", "call", "config", "site", "history", "row_bytes", "dtype", "grad", "length", "homes")
HEAD = len(FIELDS) + 3
DIRECT = 32  # ranks that gather all to all
KINDS = (
    "all_to_all_single", "dispatch", "parts", "replicas", PLAN, "statistics", "crossing", "sizes", "masters", "first",
)  # fmt: skip
DTYPES: dict[torch.dtype, int] = {
    dtype: i
    for i, dtype in enumerate(
        (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.int32,
            torch.uint8,
            torch.bool,
        )
    )
}
_WHY = {
    "kind": "every rank must make the same calls in the same order",
    "call": "every rank must make the same calls in the same order",
    "config": "give every rank the same cluster, scheduler, planner and options, and call mark_dead on every rank",
    "history": "their plans differed before; every rank must run the same moeyard on the same inputs",
    "row_bytes": "rows must be as wide on every rank",
    "dtype": "rows must have the same dtype on every rank",
    "grad": "rows (1), experts' parameters (2) and weights that travel (4) require grad on every rank or on none",
    "site": "they are in different layers of experts; every rank must make and run the same layers in the same order",
    "homes": "experts must have the same homes and hosts on every rank, and tokens as many choices where rows may cross once; give every rank the same home_E or placement, and top-k",
    "length": "every rank must have the same number of experts and ranks",
}


def dtype_code(dtype: torch.dtype) -> int:
    code = DTYPES.get(dtype)
    return 100 + small_digest(str(dtype)) % 1000 if code is None else code


@dataclass
class Frame:
    """One rank's side of an agreement."""

    kind: str
    call: int
    config: int
    history: int
    row_bytes: int = 0
    dtype: int = 0
    grad: int = 0
    site: int = 0
    homes: int = 0
    flaw: Flaw | None = None


class Control:
    """Gathers over a gloo group of its own, on CPU tensors: it waits for no stream and no rail group."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], lost: Callable[[str], Exception]
    ) -> None:
        """ranks: of the group, in the world's numbers, which errors carry in `.ranks`."""
        self.group, self.ranks, self._lost = group, tuple(ranks), lost
        self.size = size = len(self.ranks)
        self.room = max(2 * size, 256)
        self._out, self._in = torch.zeros((2, size, HEAD + self.room), dtype=torch.int64).unbind()
        self._mine, self._all = self._out.numpy(), self._in.numpy()  # the same memory

    def agree(self, frame: Frame, payload: IntArray) -> IntArray:
        """[rank, value]: the payloads of all ranks, or Mismatch on every rank, naming a pair."""
        mine, frames, n = self._mine, self._all, len(payload)
        flaw = frame.flaw or Flaw(0)
        mine[:, :HEAD] = (
            KINDS.index(frame.kind),
            frame.call,
            frame.config,
            frame.site,
            frame.history,
            frame.row_bytes,
            frame.dtype,
            frame.grad,
            n,
            frame.homes,
            flaw.code,
            flaw.a,
            flaw.b,
        )
        fits = n <= self.room
        if fits:
            mine[:, HEAD : HEAD + n] = payload
        with self._naming_ranks():
            self._all_to_all(self._in, self._out).wait()
        self._check(frames)
        return frames[:, HEAD : HEAD + n].copy() if fits else self.gather(payload)

    def agree_digest(self, digest: int) -> Callable[[], None]:
        """Start comparing one number; call the result to finish: Mismatch unless it is equal on all ranks."""
        out = torch.empty((self.size, 1), dtype=torch.int64)
        with self._naming_ranks():
            work = self._all_to_all(out, torch.full_like(out, digest))

        def finish() -> None:
            with self._naming_ranks():
                work.wait()
            found = out.numpy()[:, 0]
            if (found != found[0]).any():
                a, b = odd_pair(found)
                raise Mismatch(
                    f"rank {a} and rank {b} planned differently from the same counts (digests {found[a]:#x} and "
                    f"{found[b]:#x}); nothing was sent; run the same moeyard, numpy and numba on every rank",
                    [self.ranks[r] for r in odd_ones(found)],
                )

        return finish

    def gather(self, values: IntArray) -> IntArray:
        """[rank, value]. Lengths must agree."""
        out = torch.empty((self.size, len(values)), dtype=torch.int64)
        mine = torch.from_numpy(np.ascontiguousarray(values)).expand_as(out)
        with self._naming_ranks():
            self._all_to_all(out, mine.contiguous()).wait()
        return out.numpy()

    def _all_to_all(self, out: torch.Tensor, mine: torch.Tensor) -> Any:
        """`mine` has the same row for every rank. gloo gathers round a ring, one latency a rank; a few ranks are quicker
        all to all, in one."""
        if self.size <= DIRECT:
            return self.group.alltoall_base(out, mine, [], [])
        return self.group._allgather_base(out.view(-1), mine[0])

    @contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        """A backend's error becomes the one that names the ranks."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(str(error)) from error

    def _check(self, frames: IntArray) -> None:
        n = len(FIELDS)
        if frames[0, n] == 0 and (frames[:, : n + 1] == frames[0, : n + 1]).all():
            return
        flawed = np.flatnonzero(frames[:, len(FIELDS)])
        for i, field in enumerate(FIELDS[:2]):  # a rank in another call has other arguments: say that first
            self._compare(frames, i, field)
        if len(flawed):
            r = int(flawed[0])
            code, a, b = frames[r, len(FIELDS) : HEAD].tolist()
            who = [self.ranks[one] for one in flawed]
            raise Mismatch(f"rank {r}: {Flaw(code, a, b).text()}; nothing was sent", who)
        for i, field in enumerate(FIELDS[2:], start=2):
            self._compare(frames, i, field)

    def _compare(self, frames: IntArray, i: int, field: str) -> None:
        column = frames[:, i]
        if (column == column[0]).all():
            return
        a, b = odd_pair(column)
        show = (lambda v: KINDS[v]) if field == "kind" else str
        raise Mismatch(
            f"rank {a} and rank {b} disagree on {field}: {show(int(column[a]))} and {show(int(column[b]))}; "
            f"nothing was sent; {_WHY[field]}",
            [self.ranks[r] for r in odd_ones(column)],
        )


def odd_pair(values: IntArray) -> tuple[int, int]:
    """(a rank of the most common value, the first rank that differs), lower rank first."""
    common, _ = Counter(values.tolist()).most_common(1)[0]
    one = int(np.flatnonzero(values == common)[0])
    other = int(np.flatnonzero(values != common)[0])
    return min(one, other), max(one, other)


def odd_ones(values: IntArray) -> list[int]:
    """The ranks that differ from most; all of them where no value is the most common: it cannot be told who is wrong."""
    (common, count), *others = Counter(values.tolist()).most_common()
    tied = any(n == count for _, n in others)
    return np.flatnonzero((values != common) | tied).tolist()
