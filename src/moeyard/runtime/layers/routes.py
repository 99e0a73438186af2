"""Which way the rows of a call go: choices are counted, all ranks tell one another the counts, and the same routes follow on each.

choices --> counted --> agreed --> hosts (planned ahead, or now) --> split over them --> a route for every part of the tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.assign import assign
from moeyard.assignment import Assignment
from moeyard.crossing import Crossing
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand
from moeyard.placement import Placement
from moeyard.runtime.agree.agreement import Asked
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.block.compiled import recomputing
from moeyard.runtime.block.routing import Routing
from moeyard.runtime.layers import crossing
from moeyard.runtime.layers.ahead import Call, Layer, choose_placement, homes_of
from moeyard.runtime.layers.counted import Counted, Together, about, count, together
from moeyard.runtime.layers.crossing import Once
from moeyard.runtime.layers.device import to_device
from moeyard.runtime.layers.replicas import Ahead
from moeyard.runtime.roles import Hosts


@dataclass(frozen=True, eq=False)
class Route:
    """How the rows of one call travel. `combine` takes them back the same way."""

    yard: Hosts
    placement: Placement
    assignment: Assignment
    demand: Demand
    plan: Plan
    tokens: int
    top_k: int
    experts: tuple[int, ...]  # hosted here, ascending
    counts: tuple[int, ...]  # rows of each
    ends: torch.Tensor = field(repr=False)  # int32 on the device: where each expert's rows end
    wire: Routing = field(repr=False)  # the rows as they are sent
    grouped: Order | None = field(repr=False)  # from arriving rows to rows by expert; None: they arrive so
    begun: Ahead | None = field(default=None, repr=False)  # the gather of its experts, under way
    once: Once | None = field(default=None, repr=False)  # rows cross to a node once


class Order(NamedTuple):
    """Row i is row forth[i] of those before; on the way back row back[i]."""

    forth: torch.Tensor
    back: torch.Tensor

    def reversed(self) -> Order:
        return Order(self.back, self.forth)


def plan_routes(
    x_TD: torch.Tensor,
    top_k_index: torch.Tensor,
    yard: Hosts,
    num_experts: int,
    layer: Layer,
    *,
    home_E: IntArray | None = None,
    placement: Placement | None = None,
    chunks: int = 1,
    choose: Callable[[Demand, Assignment, Placement], int] | None = None,
    once: Together | None = None,
    most: int | None = None,
) -> list[Route]:
    """Routes of the tokens in `chunks` parts, one after another, from one agreement. choose: how many it is to be, 1 or `chunks`, from
    what all ranks know. once: rows may cross to a node once. most: rows that a rank may receive in one part; then there may be more."""
    home_E = homes_of(home_E, placement, num_experts, yard.size)
    row_bytes, choices = max(1, x_TD.shape[1] * x_TD.element_size()), top_k_index.shape[1] if once else 1
    call, looked = None, once is not None and crossing.looked_for(yard, layer.site)
    if layer.stacks and placement is None and yard.options.plans_ahead:
        call = Call(yard, layer, home_E, row_bytes, choices)
    told, ahead = (0, 0) if call is None else call.opened()
    parts = [count(one, num_experts, looked) for one in top_k_index.tensor_split(chunks)]
    known = looked and placement is None and yard.options.planner == "static"  # no replicas
    telling = [] if not known else parts if choose is None else [together(parts)]
    crossed = crossing.cross_at_home(yard, home_E, telling)
    values = yard.agree(
        "dispatch",
        np.concatenate([*(part.rows_E for part in parts), [told], *map(crossing.told, crossed)]),
        **about(x_TD, layer, row_bytes, bool(once and once.grad)),
        homes=small_digest(
            np.asarray(home_E, np.int64), None if placement is None else placement.hosts_ER, choices
        ),
        flaw=next((part.flaw for part in parts if part.flaw is not None), None),
        ahead=ahead,
    )
    counted = chunks * num_experts
    rows_CRE = values[:, :counted].reshape(yard.size, chunks, num_experts).transpose(1, 0, 2)
    demand, begun = Demand(rows_CRE.sum(axis=0)), None
    if call is not None:
        hosts, begun = call.hosts(demand, int(np.bitwise_or.reduce(values[:, counted])))
    else:
        hosts = placement or _hosts_now(yard, layer, demand, home_E, choices)
    job = _Job(yard, hosts, row_bytes, None if call is None else call.scheduler)
    served = job.assigned(demand)
    crosses = once is not None and crossing.decide(yard, layer.site, served, choices, row_bytes)
    if chunks > 1 and choose is not None and (crosses or choose(demand, served, hosts) == 1):
        parts = [together(parts) if looked else count(top_k_index, num_experts, False)]
        rows_CRE = demand.rows[None]
    if crosses and not looked:  # as the last call of this layer did not
        parts = [count(one, num_experts, True) for one in top_k_index.tensor_split(len(parts))]
    parts, rows_CRE = job.within(most, parts, rows_CRE, top_k_index, crosses)
    across = _Crossed(crosses, crossed, values[:, counted + 1 :])
    routes = job.routes(top_k_index, parts, rows_CRE, demand, served, across)
    if call is not None:
        begun = call.served(demand, hosts, begun)
    return [replace(route, begun=begun) for route in routes]


def _hosts_now(yard: Hosts, layer: Layer, demand: Demand, home_E: IntArray, top_k: int) -> Placement:
    """Planned on this very call's counts; they are kept for `rehome`."""
    if layer.site and not recomputing():
        yard.forecasts.note(layer.site, demand)
    return choose_placement(yard.cluster, yard.options, demand, home_E, top_k)


class _Crossed(NamedTuple):
    """Whether rows cross to a node once, and what was told of it together with the counts."""

    crosses: bool
    mine: list[Crossing]  # of each part; none: it was not told
    told_RF: IntArray

    def of(self, part: int, parts: int) -> crossing.Heard | None:
        """None: it was not told, or of other parts."""
        if not self.crosses or len(self.mine) != parts:
            return None
        return crossing.Heard(self.mine[part], np.array_split(self.told_RF, parts, axis=1)[part])


class _Job(NamedTuple):
    """What the parts of one call have in common."""

    yard: Hosts
    hosts: Placement
    row_bytes: int
    scheduler: str | None  # chosen ahead

    def assigned(self, demand: Demand) -> Assignment:
        options = self.yard.options
        return assign(self.yard.cluster, demand, self.hosts, options.policy, model=options.costed)

    def within(
        self,
        most: int | None,
        parts: list[Counted],
        rows_CRE: IntArray,
        index_TK: torch.Tensor,
        on_host: bool,
    ) -> tuple[list[Counted], IntArray]:
        """Parts of which no rank receives more than `most` rows: halved and counted again until that is so, by all ranks alike."""
        experts = rows_CRE.shape[2]
        while most is not None and max(self.assigned(Demand(rows)).rows_R.max() for rows in rows_CRE) > most:
            if len(parts) > rows_CRE.sum(axis=(0, 2)).max():
                raise InvalidDemand(
                    f"a rank receives more than most_rows={most} even if every rank sends one token at a time; allow at least "
                    f"{max(self.assigned(Demand(rows)).rows_R.max() for rows in rows_CRE)}"
                )
            parts = [count(one, experts, on_host) for one in index_TK.tensor_split(2 * len(parts))]
            values = self.yard.agree("parts", np.concatenate([part.rows_E for part in parts]))
            rows_CRE = values.reshape(self.yard.size, len(parts), experts).transpose(1, 0, 2)
        return parts, rows_CRE

    def routes(
        self,
        index_TK: torch.Tensor,
        parts: list[Counted],
        rows_CRE: IntArray,
        demand: Demand,
        served: Assignment,
        told: _Crossed,
    ) -> list[Route]:
        """One a part, planned together; demand, served: of all tokens."""
        indices = index_TK.tensor_split(len(parts))
        demands, servings = [demand], [served]
        if len(parts) > 1:
            demands = [Demand(np.ascontiguousarray(rows)) for rows in rows_CRE]
            servings = [self.assigned(one) for one in demands]
        asked, heard = zip(
            *(
                self._asked(part, one, told.of(i, len(parts)), told.crosses)
                for i, (part, one) in enumerate(zip(parts, servings, strict=True))
            ),
            strict=True,
        )
        plans = self.yard.agreement.plans_of(asked, self.scheduler)
        return [
            self._route(*one) for one in zip(indices, parts, demands, servings, heard, plans, strict=True)
        ]

    def _asked(
        self, part: Counted, served: Assignment, heard: crossing.Heard | None, crosses: bool
    ) -> tuple[Asked, crossing.Heard | None]:
        """What a part sends, and what of it crosses to a node once; None where that does not pay for it."""
        hosts = self.hosts
        digest = small_digest(
            hosts.home_E, hosts.hosts_ER, served.src, served.expert, served.host, served.rows
        )
        if crosses:
            heard = heard or crossing.cross_after(self.yard, part.expert_TK, served, hosts.num_experts)
            fanned = heard.traffic(self.yard, self.row_bytes)
            if crossing.worth_once(self.yard, served.rows_RR, fanned):
                return Asked(fanned, digest), heard
        return Asked(served.traffic(self.row_bytes), digest), None

    def _route(
        self,
        index: torch.Tensor,
        part: Counted,
        demand: Demand,
        served: Assignment,
        heard: crossing.Heard | None,
        plan: Plan,
    ) -> Route:
        yard, hosts, once = self.yard, self.hosts, None
        if heard is not None:
            once = crossing.once_of(plan, hosts, part.expert_TK, heard.mine, served.rows_RR, index.device)
        return _route(yard, hosts, served, demand, plan, part, index, once)


def _route(
    yard: Hosts,
    placement: Placement,
    served: Assignment,
    demand: Demand,
    plan: Plan,
    part: Counted,
    index: torch.Tensor,
    once: Once | None,
) -> Route:
    device = index.device
    here = served.host == yard.rank
    src, got, rows = served.src[here], served.expert[here], served.rows[here]
    experts = np.flatnonzero(placement.hosts_ER[:, yard.rank])
    rows_E = np.bincount(got, weights=rows, minlength=placement.num_experts).astype(np.int64)[experts]
    grouped = None
    if once is None:
        wire = _wire(part.order(index).index_select(0, _sent(served, yard.rank, device)), index.shape)
        # Arrived by source, then expert; the experts want them by expert, then source.
        by_expert = np.lexsort((src, got))
        grouped = None if _in_order(by_expert) else _gather_index(rows, by_expert, device)
    return Route(
        yard=yard,
        placement=placement,
        assignment=served,
        demand=demand,
        plan=plan,
        tokens=index.shape[0],
        top_k=index.shape[1],
        experts=tuple(experts.tolist()),
        counts=tuple(rows_E.tolist()),
        ends=to_device(np.cumsum(rows_E), device, torch.int32),
        wire=wire if once is None else once.wire,
        grouped=None if grouped is None else Order(grouped, _inverse(grouped)),
        once=once,
    )


def _sent(served: Assignment, rank: int, device: torch.device) -> torch.Tensor:
    """Sorted by expert here; on the wire by host, then expert."""
    mine = served.src == rank
    expert, host, rows = served.expert[mine], served.host[mine], served.rows[mine]
    return _gather_index(rows, np.lexsort((expert, host)), device)


def _in_order(order: IntArray) -> bool:
    return bool((order == np.arange(len(order))).all())


def _wire(sent: torch.Tensor, shape: torch.Size) -> Routing:
    """Row i on the wire is the pair (token, choice) sent[i]; all rows are somebody's."""
    ends = torch.full((1,), len(sent), dtype=torch.int32, device=sent.device)
    return Routing(_inverse(sent).to(torch.int32).view(shape), sent.to(torch.int32), ends)


def _gather_index(lengths: IntArray, order: IntArray, device: torch.device) -> torch.Tensor:
    """Runs of these lengths lie one after another; the index that reads them in another order."""
    total = int(lengths.sum())
    if _in_order(order):
        return torch.arange(total, device=device)
    start = np.cumsum(lengths) - lengths
    length = lengths[order]
    shift = start[order] - (np.cumsum(length) - length)
    if device.type != "cuda":
        return torch.from_numpy(np.arange(total) + np.repeat(shift, length))
    both = to_device(np.stack([shift, length]), device)
    return torch.arange(total, device=device) + torch.repeat_interleave(both[0], both[1], output_size=total)


def _inverse(index: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(len(index), device=index.device)
    return inverse
