"""What one rank does for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from moeyard.errors import InvalidFile, MoeyardError
from moeyard.runtime.agree.floor import Floor


def on_first(floor: Floor, action: Callable[[], str]) -> str:
    """What the group's first rank gets from `action`, on every rank; its error too."""
    group = floor.meet().group
    box: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            box[0] = action()
        except (OSError, MoeyardError) as error:
            box[1] = error
    first = dist.get_global_rank(group, 0)
    floor.watched(lambda: dist.broadcast_object_list(box, src=first, group=group))
    if box[1] is not None:
        raise box[1]
    return str(box[0])


def by_first(floor: Floor, mine: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """The group's first rank sees what every rank has and gives each its answer; its error is everyone's."""
    group = floor.meet().group
    ranks, first = dist.get_world_size(group), dist.get_global_rank(group, 0)
    theirs: list[Any] | None = [None] * ranks if dist.get_rank(group) == 0 else None
    floor.watched(lambda: dist.gather_object(mine, theirs, dst=first, group=group))
    answers: list[Any] | None = None
    if theirs is not None:
        try:
            answers = [(one, None) for one in decide(theirs)]
        except (OSError, MoeyardError) as error:
            answers = [(None, error)] * ranks
    box: list[Any] = [None]
    floor.watched(lambda: dist.scatter_object_list(box, answers, src=first, group=group))
    answer, wrong = box[0]
    if wrong is not None:
        raise wrong
    return answer


def all_or_none(floor: Floor, error: Exception | None, kind: type[MoeyardError] = InvalidFile) -> None:
    """After a part that each rank does alone: the own error, or one of this kind that says which ranks had one."""

    def told(errors: list[str | None]) -> list[str]:
        return ["; ".join(f"rank {rank}: {one}" for rank, one in enumerate(errors) if one)] * len(errors)

    wrong = by_first(floor, None if error is None else f"{type(error).__name__}: {error}", told)
    if error is not None:
        raise error
    if wrong:
        raise kind(wrong)
