"""Hops on which a codec carries experts: who holds what, and one gather's messages.

    prepare     on the caller's thread, all ranks alike: who gets a message and who an anchor follows from who got what before
    cross       behind the training: encode at home, send along the tree, decode; then all ranks tell one another which messages were
                not what they should be, and anchors follow at once

An anchor is the whole expert, signed; an expert's receivers all get one, or none. Everybody knows who holds which version; homes and receivers
alone have the copies. A recomputed forward and the backward pass read what is held, and send nothing.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from moeyard.arrays import BoolArray, IntArray
from moeyard.errors import InvalidModel
from moeyard.runtime.agree.agreement import make_plan
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.codec.copies import HeldCopy, Residual, held_copy
from moeyard.runtime.codec.message import CHANGED, SAME, TAIL, kind_of, number_of, seal, sign, signed
from moeyard.runtime.codec.spec import ROUND, Codec, filled
from moeyard.runtime.faults.errors import Mismatch
from moeyard.runtime.layers.copies import Copies, Cut, Tier
from moeyard.runtime.layers.shared import Mean, find_mean, plan_mean
from moeyard.runtime.layers.travel import travel
from moeyard.runtime.roles import Hosts
from moeyard.runtime.transport.behind import Carry, Job
from moeyard.stepplan import TIERS
from moeyard.traffic import Traffic

WAN = TIERS.index("wan")
_SIZES = 32  # that a message up to as long as its expert may have

Master = Callable[[int], torch.Tensor]  # expert at home here -> [width], in its own dtype


class Link(NamedTuple):
    """What all ranks know of an expert's receivers."""

    home: int
    holders: frozenset[int]
    version: int


@dataclass
class Chain:
    """One layer's receivers. links: known to all; copies: of this rank, as home or as receiver; seen: of masters at their last message."""

    links: dict[int, Link] = field(default_factory=dict)
    copies: dict[int, HeldCopy] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    job: Job | None = None  # the last one that changes the copies
    loads: int = 0  # of the workspace, when copies were last anchored for one


class Errand(NamedTuple):
    """What one gather sends."""

    anchors: frozenset[int]
    versions: dict[int, int]
    cut: Cut  # of messages
    size: int  # words of a message
    plans: dict[tuple[str, bool], Plan]  # by tier, and whether for anchors
    verdict: Plan
    encoded: dict[int, torch.Tensor]  # messages that had to be made to know their size
    here: frozenset[int]  # experts of which this rank then has a copy: at home, or received by a coded hop
    mean: Mean | None  # of all experts, where differences are to that


class Coded:
    """The coded hops of one gather."""

    def __init__(
        self, yard: Hosts, codec: Codec, copies: Copies, dtype: torch.dtype, width: int, site: int
    ) -> None:
        if site == 0:
            raise InvalidModel(
                "a codec keeps what receivers hold between calls, by layer; give gather_experts the layer's site (yard.next_site())"
            )
        self.yard, self.copies, self.dtype, self.width = yard, copies, dtype, width
        self.codec, self.site = codec, site
        hops = copies.layer.hops_H4
        self.hops = hops[(hops[:, 0] == WAN) | self.codec.everywhere]
        self.tiers = [tier for tier in copies.tiers if self.covers(tier)]
        workspace = yard.workspace
        self.chain: Chain = workspace.chains.setdefault((site, dtype), Chain(loads=workspace.loads))
        self.tally: Counter[str] = yard.workspace.tally
        self.errand: Errand | None = None

    def covers(self, tier: Tier) -> bool:
        return self.codec.everywhere or tier.name == TIERS[WAN]

    @property
    def coded_ER(self) -> BoolArray:
        """Hosts whose copy came by way of a coded hop."""
        found = np.zeros_like(self.copies.placement.hosts_ER)
        coded = {tuple(hop) for hop in self.hops.tolist()}
        for hop in sorted(self.copies.layer.hops_H4.tolist(), reverse=True):  # the wide tiers first
            _, src, dst, expert = hop
            found[expert, dst] = tuple(hop) in coded or found[expert, src]
        return found

    # by all ranks, alike

    def prepare(self, fresh: bool, master: Master) -> None:
        """fresh: the parameters may have changed since the last gather."""
        links, wanted = self.chain.links, self._wanted()
        current = {e for e, (home, holders) in wanted.items() if _reaches(links.get(e), home, holders)}
        self.errand = None
        if self.chain.job is not None and (self.codec.exact or not fresh):
            self.chain.job.wait()  # what it leaves with the receivers is looked at here
        if not wanted or (not fresh and not self._other(wanted.keys() - current, current, master)):
            return
        anchors = frozenset(wanted.keys() - current)
        versions = {e: links[e].version + 1 if e in current else 0 for e in wanted}
        self.chain.links = {e: Link(*wanted[e], versions[e]) for e in wanted}
        encoded = self._encode(sorted(current), master) if self.codec.exact else {}
        size = self._size(encoded, bool(current))
        cut = self.copies.cut(size, 4, self.yard.cluster, self.yard.behind.waves)
        plans = {
            (tier.name, whole): self.yard.plan(traffic, self.copies.digest)
            for tier in self.tiers
            for whole in (False, True)
            if (traffic := self._traffic(tier, anchors if whole else current, whole, cut)) is not None
        }
        told = np.ones((self.yard.size, self.yard.size), np.int64) - np.eye(self.yard.size, dtype=np.int64)
        verdict = self.yard.plan(Traffic(told, -(-len(self.copies.placement.home_E) // 8)))  # a bit an expert
        mine = self.yard.rank
        here = frozenset(e for e, (home, holders) in wanted.items() if mine == home or mine in holders)
        mean = plan_mean(self.yard, self._cut()) if self.codec.shares else None
        self.errand = Errand(anchors, versions, cut, size, plans, verdict, encoded, here, mean)

    def _other(self, dropped: set[int], current: set[int], master: Master) -> bool:
        """Whether receivers have to be told once more what the forward told them: another one, with other receivers or other weights, may have
        come between. With what loses bits they are not told quite the same."""
        other = bool(dropped) or self._strayed(current, master)
        if other and not self.codec.exact:
            warnings.warn(
                f"layer {self.site - 1}: other experts or other weights were gathered between a forward and its backward pass; with codec "
                f"{self.codec.kind}:{self.codec.number} the backward's replicas are near the forward's, not the same: run the "
                "backward pass first, or use codec='lossless'",
                stacklevel=2,
            )
        return other

    def _strayed(self, experts: set[int], master: Master) -> bool:
        """Whether a master is not what its receivers were told of last. Only homes see it, so all ranks ask one another."""
        own = filter(self._home, sorted(experts))
        here = any(self.chain.seen.get(expert) != number_of(master(expert)) for expert in own)
        return bool(self.yard.agree("masters", [int(here)]).any())

    def _wanted(self) -> dict[int, tuple[int, frozenset[int]]]:
        home = self.copies.placement.home_E
        found: dict[int, set[int]] = {}
        for _, _, dst, expert in self.hops.tolist():
            found.setdefault(expert, set()).add(dst)
        return {e: (int(home[e]), frozenset(ranks)) for e, ranks in sorted(found.items())}

    def _size(self, encoded: dict[int, torch.Tensor], any_message: bool) -> int:
        """Words of this gather's messages. Where they follow from what changed, in steps: each other size is another plan."""
        if not self.codec.exact:
            return self.codec.filled(self.width)
        longest = max((len(words) for words in encoded.values()), default=1)
        if any_message:
            longest = int(self.yard.agree("sizes", [longest]).max())
        return filled(longest, filled(self.width * self.dtype.itemsize // 4 // _SIZES, ROUND))

    def _traffic(
        self, tier: Tier, experts: frozenset[int] | set[int], whole: bool, cut: Cut
    ) -> Traffic | None:
        ranks = self.yard.size
        number, src, dst, expert = self.hops.T
        mine = (number == TIERS.index(tier.name)) & np.isin(expert, sorted(experts))
        rows = np.bincount(src[mine] * ranks + dst[mine], minlength=ranks * ranks).reshape(ranks, ranks)
        way = self._cut(TAIL) if whole else cut
        return Traffic(rows * way.parts, way.row_bytes) if rows.any() else None

    def _cut(self, more: int = 0) -> Cut:
        """Of a whole expert, and so many values behind it."""
        width, itemsize = self.width + more, self.dtype.itemsize
        return self.copies.cut(width, itemsize, self.yard.cluster, self.yard.behind.waves)

    # behind the training

    @torch.no_grad()
    def cross(self, carry: Carry, master: Master) -> None:
        """Bring what receivers hold to where this gather wants it."""
        errand = self.errand
        if errand is None:
            return
        for dropped in self.chain.copies.keys() - errand.here:
            del self.chain.copies[dropped]
        flags = np.zeros(len(self.copies.placement.home_E), np.int64)
        self._anchor_own(errand.anchors, master)
        if errand.mean is not None:
            self._share(carry, errand.mean, master)
        current = [e for e in errand.versions if e not in errand.anchors and self._home(e)]
        messages = errand.encoded or self._encode(current, master)
        loads = self.yard.workspace.loads
        loaded = loads != self.chain.loads and not (self.codec.exact or self.codec.shares)
        for expert in messages:
            flags[expert] |= loaded or self.chain.copies[expert].strayed(master(expert))
        self.chain.loads = loads
        for tier in self.tiers:
            self._send_messages(carry, tier, errand, messages, flags)
            self._send_anchors(carry, tier, errand.anchors, errand.plans.get((tier.name, True)), flags)
        again = self._verdict(carry, errand, flags)
        if again:
            self._mend(carry, errand, again, master)

    def _share(self, carry: Carry, mean: Mean, master: Master) -> None:
        """Every copy here gets the mean of all experts, from which the next message starts."""
        own = torch.zeros(self.width, device=self.yard.device)
        for expert in self.copies.own.tolist():
            own += master(expert).float()
        shared = find_mean(carry, mean, own, len(self.copies.placement.home_E), self.dtype)
        for copy in self.chain.copies.values():
            if isinstance(copy, Residual):
                copy.shared = shared

    def _home(self, expert: int) -> bool:
        return int(self.copies.placement.home_E[expert]) == self.yard.rank

    def _anchor_own(self, experts: frozenset[int] | set[int], master: Master) -> None:
        for expert in filter(self._home, sorted(experts)):
            whole = master(expert)
            self.chain.copies[expert] = held_copy(self.codec, whole.to(self.dtype))
            self.chain.seen[expert] = number_of(whole)

    def _encode(self, experts: Sequence[int], master: Master) -> dict[int, torch.Tensor]:
        """Messages of own experts, their kind in place; one that has not changed since keeps its receivers where they are."""
        made = {}
        for expert in filter(self._home, experts):
            whole = master(expert)
            bits = number_of(whole)
            # A checksum may be equal by chance: a lossy difference is then sent with the next, a lossless one must be sent.
            same = not self.codec.exact and self.chain.seen.get(expert) == bits
            if same:
                made[expert] = torch.zeros(ROUND, dtype=torch.int32, device=whole.device)
            else:
                made[expert] = self.chain.copies[expert].encode(whole)
            made[expert][1] = SAME if same else CHANGED
            self.chain.seen[expert] = bits
        return made

    def _send_messages(
        self, carry: Carry, tier: Tier, errand: Errand, messages: dict[int, torch.Tensor], flags: IntArray
    ) -> None:
        plan = errand.plans.get((tier.name, False))
        if plan is None:
            return
        leave, arrive = (self._of(places, errand.anchors, False) for places in (tier.leave, tier.arrive))
        leaving = torch.zeros((len(leave), errand.size), dtype=torch.int32, device=self.yard.device)
        for row, expert in zip(leaving, leave, strict=True):
            row[: len(messages[expert])] = messages[expert]
            if self._home(expert):  # with what it is filled up with; others hand on what they got
                seal(row, errand.versions[expert], int(row[1]))
        arriving = travel(carry, plan, errand.cut, leaving, len(arrive))
        for words, expert in zip(arriving, arrive, strict=True):
            messages[expert] = words
            kind = kind_of(words, errand.versions[expert])
            if kind == CHANGED:
                self.chain.copies[expert].decode(words)
            flags[expert] |= kind == 0
        self.tally["messages"] += len(leave)
        self.tally["crossed"] += len(leave) * (tier.name == TIERS[WAN])
        self.tally["bytes"] += leaving.numel() * 4

    def _send_anchors(
        self,
        carry: Carry,
        tier: Tier,
        anchors: frozenset[int] | set[int],
        plan: Plan | None,
        flags: IntArray,
    ) -> None:
        if plan is None:
            return
        leave, arrive = (self._of(places, anchors, True) for places in (tier.leave, tier.arrive))
        leaving = torch.zeros((len(leave), self.width + TAIL), dtype=self.dtype, device=self.yard.device)
        for row, expert in zip(leaving, leave, strict=True):
            row[: self.width].copy_(self.chain.copies[expert].values(self.dtype))
            sign(row)
        arriving = travel(carry, plan, self._cut(TAIL), leaving, len(arrive))
        for row, expert in zip(arriving, arrive, strict=True):
            self.chain.copies[expert] = held_copy(self.codec, row[: self.width])
            flags[expert] |= not signed(row)
        self.tally["anchors"] += len(leave)
        self.tally["crossed"] += len(leave) * (tier.name == TIERS[WAN])
        self.tally["bytes"] += leaving.numel() * leaving.element_size()

    def _of(self, places: IntArray, anchors: frozenset[int] | set[int], whole: bool) -> list[int]:
        return [e for e in self.copies.hosted[places].tolist() if (e in anchors) == whole]

    def _verdict(self, carry: Carry, errand: Errand, flags: IntArray) -> set[int]:
        """Experts that some rank wants an anchor of: the same set on all."""
        bits = torch.from_numpy(np.packbits(flags != 0))
        mine = bits.to(self.yard.device).expand(self.yard.size - 1, -1).contiguous()
        theirs = torch.empty_like(mine)
        carry(errand.verdict, False, theirs, mine)
        wanted = np.bitwise_or.reduce(theirs.cpu().numpy(), axis=0) | bits.numpy()
        return set(np.flatnonzero(np.unpackbits(wanted, count=len(flags))).tolist())

    def _mend(self, carry: Carry, errand: Errand, experts: set[int], master: Master) -> None:
        """Anchors for these, by plans that every rank makes for itself from what all know."""
        self._anchor_own(experts, master)
        flags = np.zeros(len(self.copies.placement.home_E), np.int64)
        for tier in self.tiers:
            traffic = self._traffic(tier, experts, True, self._cut())
            if traffic is None:
                continue
            options = self.yard.options
            plan = make_plan(self.yard.cluster, traffic, options.scheduler, self.yard.rank)
            self._send_anchors(carry, tier, experts, plan, flags)
        self.tally["mended"] += len(experts)
        if damaged := sorted(self._verdict(carry, errand, flags)):
            self.chain.links, self.chain.copies = {}, {}  # should the caller go on, all get anchors
            homes = sorted({int(self.copies.placement.home_E[e]) for e in damaged})
            raise Mismatch(
                f"layer {self.site - 1}: anchors of experts {damaged}, at home on ranks {homes}, arrived with other bits than were sent, twice; "
                f"look at the network between their datacenters, or go on without a codec",
                [self.yard.ranks[home] for home in homes],
            )

    # what is held

    def arrived(self, tier: Tier) -> list[torch.Tensor]:
        """[width] each, in the order of `tier.arrive`."""
        return [self.chain.copies[e].values(self.dtype) for e in self.copies.hosted[tier.arrive].tolist()]

    def sent(self, expert: int) -> torch.Tensor | None:
        """[width]: what receivers of an expert at home here should hold; None if it has none."""
        copy = self.chain.copies.get(expert)
        return None if copy is None else copy.values(self.dtype)


def _reaches(link: Link | None, home: int, holders: frozenset[int]) -> bool:
    return link is not None and link.home == home and holders <= link.holders
