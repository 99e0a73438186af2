"""Rows to experts and results back, for those who bring their own model.

    rows, route = dispatch(x, top_k_index, yard, num_experts)
    y = combine(my_experts(rows, route.counts), route, top_k_weights)

`rows` are grouped by hosted expert: first all rows of `route.experts[0]`, then of the next, `route.counts` of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.assign import assign
from moeyard.assignment import Assignment
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand
from moeyard.placement import Placement
from moeyard.planners import place
from moeyard.planners.static import static_homes
from moeyard.runtime.agree.control import dtype_code
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.faults import flaws
from moeyard.runtime.faults.flaws import Flaw
from moeyard.runtime.layers.autograd import send_rows
from moeyard.runtime.layers.device import to_device, to_host
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
    sent: torch.Tensor = field(repr=False)  # row i on the wire is the pair (token, choice) sent[i]
    unsent: torch.Tensor = field(repr=False)
    grouped: torch.Tensor = field(repr=False)  # row i of the experts' input arrived as row grouped[i]
    ungrouped: torch.Tensor = field(repr=False)


class Permute(torch.autograd.Function):
    """rows[index]; the gradient by the inverse, so nothing is ever added up."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        index, inverse = ctx.saved_tensors
        return permute(grads[0], inverse, index), None, None


class Spread(torch.autograd.Function):
    """One copy of its token per row; the gradient sums a token's copies in the order of its choices."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, sent: torch.Tensor, unsent: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(unsent)
        ctx.shape = (x_TD.shape[0], top_k, x_TD.shape[1])
        return x_TD.index_select(0, sent // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (unsent,) = ctx.saved_tensors
        return grads[0].index_select(0, unsent).view(ctx.shape).sum(1), None, None, None


def permute(rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return Permute.apply(rows, index, inverse)  # type: ignore[no-untyped-call,no-any-return]


def dispatch(
    x_TD: torch.Tensor,
    top_k_index: torch.Tensor,
    yard: Hosts,
    num_experts: int,
    *,
    home_E: IntArray | None = None,
    placement: Placement | None = None,
    site: int = 0,
) -> tuple[torch.Tensor, Route]:
    """The rows that this rank's hosted experts must compute, and the route back.

    top_k_index[T, K]: the experts that each token chose. Homes: `home_E`, or spread evenly. Hosts: `placement`, or the
    yard's planner on the demand of this very call (a pure function of it, so a recomputed forward plans the same). `site`: a
    number of the layer; ranks that are in different layers are then told so.
    """
    tokens, top_k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    if home_E is None:
        home_E = static_homes(num_experts, yard.size) if placement is None else placement.home_E
    counts_E, order, flaw = _count(chosen, num_experts)
    values = yard.agree(
        "dispatch",
        counts_E,
        row_bytes=x_TD.shape[1] * x_TD.element_size(),
        dtype=dtype_code(x_TD.dtype),
        grad=torch.is_grad_enabled() and x_TD.requires_grad,
        site=site,
        flaw=flaw,
    )
    demand = Demand(values)
    hosts = placement or choose_placement(yard, demand, home_E)
    served = assign(yard.cluster, demand, hosts, yard.options.policy, model=yard.options.model)
    digest = small_digest(hosts.home_E, hosts.hosts_ER, served.src, served.expert, served.host, served.rows)
    plan = yard.plan(served.traffic(max(1, x_TD.shape[1] * x_TD.element_size())), digest)
    route = _route(yard, hosts, served, demand, plan, order, (tokens, top_k), x_TD.device)
    rows = Spread.apply(x_TD, route.sent, route.unsent, top_k)  # type: ignore[no-untyped-call]
    arrived = send_rows(rows, plan, yard, agreed=True)
    return permute(arrived, route.grouped, route.ungrouped), route


def combine(rows: torch.Tensor, route: Route, top_k_weights: torch.Tensor | None) -> torch.Tensor:
    """The experts' results back at their tokens, summed with the weights[T, K] of the choices, or plainly."""
    if rows.shape[0] != sum(route.counts):
        raise InvalidDemand(
            f"combine got {rows.shape[0]} rows, but dispatch gave {sum(route.counts)}; return one row per row, in order"
        )
    back = send_rows(permute(rows, route.ungrouped, route.grouped), route.plan, route.yard, backward=True)
    back = permute(back, route.unsent, route.sent)
    back = back.view(route.tokens, route.top_k, rows.shape[1])
    return back.sum(1) if top_k_weights is None else (back * top_k_weights.unsqueeze(-1)).sum(1)


def choose_placement(yard: Hosts, demand: Demand, home_E: IntArray) -> Placement:
    """What the yard's planner says, with the homes where the masters are: they do not move inside a step."""
    options = yard.options
    if options.planner == "static":
        return Placement.of_homes(home_E, yard.size, "static")
    found = place(yard.cluster, demand, options.planner, options.slots, options.model)
    if (found.home_E == home_E).all():
        return found
    hosts = found.hosts_ER.copy()
    rank_R = np.arange(yard.size)
    own = home_E[:, None] == rank_R
    room = int(found.replicas_R.max()) if options.slots is None else options.slots
    heavy = np.argsort(-demand.rows.sum(axis=0), kind="stable")
    for rank in rank_R:  # the heaviest replicas stay where a home that is not ours took no slot
        extra = [e for e in heavy if hosts[e, rank] and not own[e, rank]]
        hosts[extra[room:], rank] = False
    return Placement(home_E, hosts | own, found.planner)


def _count(chosen: torch.Tensor, num_experts: int) -> tuple[IntArray, torch.Tensor, Flaw | None]:
    """(rows per expert on the host, rows sorted by expert, what is wrong with them)."""
    bad = (chosen < 0) | (chosen >= num_experts)
    bins = torch.where(bad, num_experts, chosen)
    order = torch.argsort(bins, stable=True)
    counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    if len(chosen):
        counts[num_experts + 1] = torch.where(bad, chosen, 0).abs().amax()
    host = to_host(counts)
    flaw = (
        Flaw(flaws.EXPERT_RANGE, int(host[num_experts + 1]), num_experts - 1) if host[num_experts] else None
    )
    return host[:num_experts].copy(), order, flaw


def _route(
    yard: Hosts,
    placement: Placement,
    served: Assignment,
    demand: Demand,
    plan: Plan,
    order: torch.Tensor,
    shape: tuple[int, int],
    device: torch.device,
) -> Route:
    mine = served.src == yard.rank
    expert, host, rows = served.expert[mine], served.host[mine], served.rows[mine]
    # Sorted by expert here; on the wire by host, then expert.
    sent = _gather_index(rows, np.lexsort((expert, host)), device)
    here = served.host == yard.rank
    src, got, count = served.src[here], served.expert[here], served.rows[here]
    # Arrived by source, then expert; the experts want them by expert, then source.
    grouped = _gather_index(count, np.lexsort((src, got)), device)
    experts = np.flatnonzero(placement.hosts_ER[:, yard.rank])
    rows_E = np.bincount(got, weights=count, minlength=placement.num_experts).astype(np.int64)[experts]
    sent = order.index_select(0, sent)
    return Route(
        yard=yard,
        placement=placement,
        assignment=served,
        demand=demand,
        plan=plan,
        tokens=shape[0],
        top_k=shape[1],
        experts=tuple(experts.tolist()),
        counts=tuple(rows_E.tolist()),
        ends=to_device(np.cumsum(rows_E), device, torch.int32),
        sent=sent,
        unsent=_inverse(sent),
        grouped=grouped,
        ungrouped=_inverse(grouped),
    )


def _gather_index(lengths: IntArray, order: IntArray, device: torch.device) -> torch.Tensor:
    """Runs of these lengths lie one after another; the index that reads them in another order."""
    total = int(lengths.sum())
    if (order == np.arange(len(order))).all():
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
