"""Whether parameters are what a gather took, by their bits: an optimizer's step, a fused one, a write by way of `.data` or a swap that was
undone, before they were read or after, all the same. And whose they are.

Each rank looks at its own and tells the others: one rank's doubt is everyone's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from moeyard.runtime.block.compiled import unseen
from moeyard.runtime.codec.message import number_of

_LANES = 127  # odd, so that all signs of float64, the top bits of its words, do not cancel
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seen:
    """Parameters of which a gather takes a copy, in `dtype`."""

    def __init__(self, stacks: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self.stacks, self._dtype = tuple(stacks), dtype
        self.kinds = _kinds(stacks)
        self._marks: list[Mark] = []

    def took(self, copies: Sequence[torch.Tensor]) -> None:
        """The copy, bit by bit: what was read, whatever was written meanwhile."""
        self._marks = _marks(copies, self._dtype)

    def changed(self) -> bool:
        """Whether they are other than what was taken. On CUDA it waits for the device, as whoever counts rows does anyway."""
        now = _marks(self.stacks, self._dtype)
        return not all(_same(a, b) for a, b in zip(self._marks, now, strict=True))

    def replaced(self, stacks: Sequence[torch.Tensor]) -> bool:
        """Whether others are in their place, of another dtype or shape, or trained where they were not: gradients would go astray."""
        same = len(stacks) == len(self.stacks) and all(
            a is b for a, b in zip(stacks, self.stacks, strict=True)
        )
        return not same or _kinds(stacks) != self.kinds


class Kind(NamedTuple):
    """What a stack was when it was seen: its memory may be gone for a while (offloading)."""

    trained: bool
    dtype: torch.dtype
    shape: torch.Size


def _kinds(stacks: Sequence[torch.Tensor]) -> list[Kind]:
    return [Kind(one.requires_grad, one.dtype, one.shape) for one in stacks]


Mark = int | torch.Tensor  # a number, or where it would have to be waited for, sums on the device


def _marks(stacks: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Mark]:
    with unseen(), torch.no_grad():
        return [_mark(one.detach().to(dtype)) for one in stacks]


def _same(one: Mark, other: Mark) -> bool:
    return one == other if isinstance(one, int) else torch.equal(one, torch.as_tensor(other))


def _mark(stack: torch.Tensor) -> Mark:
    """For the bits of a stack. Elsewhere than on CUDA as by chance (2 ** -64) the same for others; there sums, quick, which see all but
    what is made for it."""
    flat = stack.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:  # where words do not begin
        flat = flat.clone()
    return _sums(flat) if flat.is_cuda else number_of(flat)


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Over every 127th word and over every 127 in a row, so that what changes places shows in one of both; then what is left at the end."""
    size = flat.element_size()
    rows = len(flat) * size // (8 * _LANES)
    whole = rows * 8 * _LANES // size
    words = flat[:whole].view(torch.int64).view(rows, _LANES)
    left = flat[whole:].view(WORDS[size]).to(torch.int64)
    return torch.cat([words.sum(0), words.sum(1), left])


_sharded: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()


def by_fsdp(owner: nn.Module) -> bool:
    """Whether FSDP2 shards a parameter of this module. It then takes gradients away when the module's own backward is done, also where
    it leaves the parameters whole between calls."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return False  # nobody has called it
    from torch.distributed._composable_state import _module_state_mapping as states

    known = _sharded.get(owner)
    if known is None or known[0] != len(states):
        _sharded[owner] = known = len(states), any(one is owner for one in _modules_of(states))
    return known[1]


def _modules_of(states: Any) -> Iterator[nn.Module]:
    for state in [one() for one in list(states.values())]:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older ones have a single one, or none
            groups = [one for one in (getattr(state, "_fsdp_param_group", None),) if one is not None]
        for group in groups:
            for parameter in group.fsdp_params:
                yield parameter._module_info.module
                yield from parameter._module_info.shared_modules
