"""Of candidates, the cheapest: what its bound rules out is not made, and what is plainly worse is not followed closely."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moeyard.estimate import estimate_lanes
from moeyard.forms.lanes import Lanes, Pairs

Candidate = tuple[str, float, Callable[[], Lanes]]  # name, seconds that it cannot beat, how to make it

WORTH = 0.999  # times the best: what cannot take less is not made
CLOSE = 1.02  # times the best node by node: what is looked at again
LOOK = 2.1e-8  # seconds that it takes to follow a message inside its nodes, for each pair of their ranks (slow cores: 0.8e-8 to 2.5e-8)
ROUGH = 0.93  # times an estimate of lanes node by node: it may be as little, message by message
CHAINED = "shunt"
STAGED = "fast"  # its stages wait for one another: where a look pays, node by node takes at most 0.4% longer for it than message by message
EXCHANGES = 4  # of one plan: rows there and back, forward and backward
MANY_NODES = (
    8  # from so many on, forms are compared node by node: a lane more or less no longer changes which is best
)


class Best:
    """Seconds of the best so far, known to who proposes candidates and to who compares them: what cannot beat it is not made."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds


class Seen(NamedTuple):
    """A candidate that was made."""

    seconds: float
    least: float  # its bound
    name: str
    form: Lanes
    fine: bool  # followed message by message, else node by node


def cheapest(
    candidates: Iterable[Candidate], best: Best | None = None
) -> tuple[Lanes, str, dict[str, float]]:
    """The cheapest by `estimate`, its name, and the seconds of all that were made: what its bound rules out is not. Of those that
    cost the same, the one with the fewest stages: on even traffic, where they are alike, fewer parts drift apart less. With many
    nodes they are compared node by node, and message by message only where what moves inside nodes is known by place and that takes less
    time than it may save: the orders of `shunt` at once, since a lower best rules out more; others where several come near the best."""
    best = best or Best()
    first, seen = None, list[Seen]()
    for name, least, make in candidates:
        if least < WORTH * best.seconds:
            made = make()
            fine = made.pairs.cluster.nodes < MANY_NODES or (name == CHAINED and _pays([made], least))
            if first is not None and made.like(first.form):
                one = Seen(first.seconds, least, name, made, first.fine)
            else:
                again = not fine and made.pairs.loads.exact  # a close one may be looked at again
                limit = CLOSE * best.seconds if again else best.seconds
                one = Seen(estimate_lanes(made, fine=fine, limit=limit), least, name, made, fine)
            seen.append(one)
            alike = first is not None and math.isclose(one.seconds, first.seconds, rel_tol=1e-9)
            if first is None or (
                len(made.stages) < len(first.form.stages) if alike else one.seconds < first.seconds
            ):
                first = one
                best.seconds = min(best.seconds, one.seconds)
    assert first is not None, "no candidates"
    first = _settled(seen, first)
    found = dict[str, float]()
    for one in seen:
        found[one.name] = min(one.seconds, found.get(one.name, one.seconds))
    found[first.name] = first.seconds
    return first.form, first.name, found


def _settled(seen: list[Seen], first: Seen) -> Seen:
    """The cheapest of those near the first, compared alike: all message by message if that pays, else all node by node."""
    followed = any(one.fine for one in seen)
    reach = 1 / ROUGH if followed else CLOSE  # of two that are rough, both may be too long
    near = [one for one in seen if one.seconds <= (CLOSE if one.fine else reach) * first.seconds]
    rough = [one for one in near if not one.fine and one.name != STAGED]
    if not any(one is not first or followed for one in rough):
        return first
    if _pays([one.form for one in rough], first.seconds):
        return _looked_at_again(near)
    if not first.fine:
        return first
    alike = first._replace(seconds=estimate_lanes(first.form, fine=False))
    return min([alike, *rough], key=lambda one: one.seconds)


def by_node(pairs: Pairs) -> bool:
    """Whether forms of these pairs are never compared but node by node."""
    return pairs.cluster.nodes >= MANY_NODES and not pairs.loads.exact


def _pays(forms: list[Lanes], seconds: float) -> bool:
    """Whether these are quicker to follow message by message than what it may save of so many seconds: on every rank alike, so no clock is
    asked."""
    pairs = forms[0].pairs
    messages = sum(int(made.messages.shape[1]) for made in forms)
    look = LOOK * messages * float(pairs.cluster.ranks_per_node**2)
    return look < EXCHANGES * (CLOSE - 1.0) * seconds and pairs.loads.exact


def _looked_at_again(near: list[Seen]) -> Seen:
    """The cheapest of these message by message. The most promising first; what its bound rules out is not looked at."""
    first = None
    for one in sorted(near, key=lambda one: (one.seconds, len(one.form.stages))):
        if first is None or one.least < WORTH * first.seconds:
            if not one.fine and one.name != STAGED:
                one = one._replace(seconds=estimate_lanes(one.form), fine=True)
            if first is None or (one.seconds, len(one.form.stages)) < (first.seconds, len(first.form.stages)):
                first = one
    assert first is not None
    return first
