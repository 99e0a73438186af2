"""Who is to blame: a verdict from what the ranks said in a roll call. Nothing here looks at a store or a clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moeyard.runtime.faults.errors import ExchangeError, RailLost, RankLost

IDLE = "no call"
BEHIND = "waiting for what it began before"  # in no call either, but not elsewhere: nobody waits for it
_MOMENT = 1.0  # seconds that calls of ranks may lie apart
PLAN = "plan"  # the call in which a group compares plans: how often, is its own affair
_LOOK = 12  # calls of two ranks that are compared
Where = Mapping[str, Any]  # of one rank: `Whereabouts.told`


class Verdict(NamedTuple):
    """What the first rank that found out left for all others, so that all name the same. Ranks are the world's."""

    gone: list[int]  # did not answer
    late: list[int]  # answered from elsewhere
    found: dict[int, Where]  # where each live rank was
    by: int  # who says so
    cause: str  # and what it saw
    failed: list[int]  # by themselves, and said so: then nobody else is to blame

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: bytes | str) -> Verdict:
        data = json.loads(text)
        return cls(**data | {"found": {int(rank): where for rank, where in data["found"].items()}})


def judge(found: Mapping[int, Where], missing: Iterable[int], by: int, cause: str) -> Verdict:
    """found: where each live rank is. missing: who did not answer; then nobody else is to blame.

    All ranks meet in the same calls one after another, and those of one expert-parallel group (`family`) start the same ones. Who
    has started another than most is to blame, wherever it is now; else who is in another; else who has done fewest holds up the
    others. Of several: who is in no call at all while others wait in one; else who came last to the call in which all are now. Nobody,
    if all have waited alike; and never who waits itself for what it began before.
    """
    gone = sorted(missing)
    late = [] if gone else _late(found)
    return Verdict(gone, late, dict(found), by, cause, [])


def _late(found: Mapping[int, Where]) -> list[int]:
    if strayed := _strayed(found):
        return strayed
    # Before anybody counts meetings: who waits alone at one that is not due has met more than the others.
    odd = [rank for family in _families(found, found) for rank in _odd(family, found)]
    if odd:
        return sorted(odd)
    behind = _fewest(found, "met")
    late = [rank for family in _families(found, behind) for rank in _late_in_family(family, len(found))]
    return sorted(late) if late or len(behind) == len(found) else behind


def _strayed(found: Mapping[int, Where]) -> list[int]:
    """Who made another call than most of its family, the first time that any did. A rank that failed, caught its own error and went on
    with something else may have caught up with those who wait for it."""
    strayed: list[int] = []
    for family in {where.get("family") for where in found.values()}:
        members = [rank for rank in found if found[rank].get("family") == family]
        recent = {rank: found[rank].get("recent", ()) for rank in members}
        first = {rank: int(found[rank].get("started", 0)) - len(recent[rank]) + 1 for rank in members}
        for number in range(max(first.values()), max(first[rank] + len(recent[rank]) for rank in members)):
            there = [rank for rank in members if number - first[rank] < len(recent[rank])]
            calls = {rank: recent[rank][number - first[rank]] for rank in there}
            if len(set(calls.values())) > 1:
                (common, count), (_, next_count) = Counter(calls.values()).most_common(2)
                strayed += [rank for rank in there if calls[rank] != common and count > next_count]
                break
    return sorted(strayed)


def _families(found: Mapping[int, Where], ranks: Iterable[int]) -> list[dict[int, Where]]:
    families: dict[Any, dict[int, Where]] = {}
    for rank in ranks:
        families.setdefault(found[rank].get("family"), {})[rank] = found[rank]
    return list(families.values())


def _odd(family: Mapping[int, Where], found: Mapping[int, Where]) -> list[int]:
    """Who is in another call than most of those who have started as many; of two, who did not call what other families did, else both."""
    place = {rank: family[rank].get("state", IDLE) for rank in _fewest(family, "started")}
    place = {rank: state for rank, state in place.items() if state != BEHIND}
    if IDLE in place.values() or len(set(place.values())) < 2:
        return []
    (common, count), (_, next_count) = Counter(place.values()).most_common(2)
    if count > next_count:
        return [rank for rank in place if place[rank] != common]
    others = [_calls(where) for rank, where in found.items() if rank not in family]
    apart = [rank for rank in place if not _as_others(_calls(family[rank]), others)]
    return apart or list(place)


def _calls(where: Where) -> list[str]:
    """The last ones that every family makes."""
    return [call for call in where.get("recent", ()) if call != PLAN]


def _as_others(calls: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """Whether most others made the same calls, as far as they or this one have come."""
    return 2 * sum(_along(calls, other) or _along(other, calls) for other in others) > len(others)


def _along(calls: Sequence[str], further: Sequence[str]) -> bool:
    """Whether `further` made these calls, and then a few more perhaps."""
    for more in range(min(_LOOK, len(further))):
        made = further[: len(further) - more]
        look = min(_LOOK, len(calls), len(made))
        if look and list(calls[-look:]) == list(made[-look:]):
            return True
    return False


def _late_in_family(family: Mapping[int, Where], everyone: int) -> list[int]:
    last = _fewest(family, "started")
    place = {rank: family[rank].get("state", IDLE) for rank in last}
    idle = [rank for rank in last if place[rank] == IDLE]
    if idle and len(idle) < everyone:
        return idle
    last = [rank for rank in last if place[rank] != BEHIND]
    if not last or len(place) < len(family):
        return last
    # All wait in the same call, some so long that they gave up: who came to it just now was late.
    waited = {rank: float(family[rank].get("seconds", 0.0)) for rank in last}
    longest = max(waited.values())
    return [rank for rank in last if longest > _MOMENT and waited[rank] < longest / 2]


def _fewest(found: Mapping[int, Where], what: str) -> list[int]:
    counts = {rank: int(where.get(what, 0)) for rank, where in found.items()}
    return [rank for rank in sorted(found) if counts[rank] == min(counts.values())]


def error_of(verdict: Verdict, me: int, where: Where, link: str, reason: str, railed: bool) -> ExchangeError:
    """What rank `me` raises. link: the pair whose message failed, as text. railed: rails are bound, so one may have died."""
    head = f"rank {me}, {place_of(where)}{link}"
    heard = "" if verdict.by == me else f", as rank {verdict.by} found: {verdict.cause}"
    others = whereabouts(verdict.found)
    if verdict.failed:
        names, seen = ", ".join(map(str, verdict.failed)), "" if verdict.by == me else f" (here: {reason})"
        return RankLost(
            f"{head}: rank {names} failed {verdict.cause}{seen}; what it was to send never comes; restart it",
            verdict.failed,
        )
    if verdict.gone:
        names = ", ".join(map(str, verdict.gone))
        return RankLost(
            f"{head}: rank {names} is gone (no answer to the roll call; {reason}{heard}); {others}; restart it",
            verdict.gone,
        )
    idle = [r for r in verdict.late if verdict.found.get(r, {}).get("state") == IDLE]
    if railed and not idle:
        return RailLost(
            f"{head}: {reason}; all ranks answer, a rail may be dead; call yard.recover(error) on every rank"
        )
    if verdict.late:
        names = ", ".join(map(str, verdict.late))
        return RankLost(
            f"{head}: rank {names} is elsewhere, {place_of(verdict.found[verdict.late[0]])} ({reason}{heard}); {others}; "
            f"every rank must make the same calls in the same order, and come within the time-out",
            verdict.late,
        )
    return RankLost(
        f"{head}: {reason}{heard}; all ranks live and are in the same call; raise timeout= if the network is only slow"
    )


def store_lost(head: str, error: BaseException, keeper: int | None) -> RankLost:
    """When nobody can be asked any more: the store went with who keeps it."""
    who = "who keeps it" if keeper is None else f"rank {keeper}, which keeps it,"
    return RankLost(
        f"{head}; the store is gone too ({type(error).__name__}: {str(error)[:80]}), so {who} is lost; restart the job",
        () if keeper is None else (keeper,),
    )


def place_of(where: Where) -> str:
    """call 12 (dispatch for 3.1 s)"""
    seconds = f" for {where['seconds']:.1f} s" if "seconds" in where else ""
    return f"call {where.get('started', '?')} ({where.get('state', '?')}{seconds})"


def whereabouts(found: Mapping[int, Where]) -> str:
    """Where everyone was, ranks at the same place together."""
    places: dict[tuple[Any, Any], list[int]] = {}
    for rank in sorted(found):
        where = found[rank]
        places.setdefault((where.get("started"), where.get("state")), []).append(rank)
    return ", ".join(f"rank {_span(ranks)}: call {at} ({state})" for (at, state), ranks in places.items())


def _span(ranks: Sequence[int]) -> str:
    """0-3, 5"""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)
