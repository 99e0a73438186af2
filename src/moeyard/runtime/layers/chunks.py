"""A layer's tokens through their experts: dispatch, compute, combine; in one go, or in chunks that hide one another's exchanges.

    one          dispatch        experts           combine
    two          dispatch 1      experts 1         experts 2       combine 2
    behind                       dispatch 2        combine 1

Backwards autograd takes the nodes in the reverse of the order in which they were made, which is the same picture from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from moeyard.arrays import IntArray, writable
from moeyard.assignment import Assignment
from moeyard.cost import ports_of
from moeyard.demand import Demand
from moeyard.kernels.step import transport as kernel
from moeyard.placement import Placement
from moeyard.runtime.layers import crossing
from moeyard.runtime.layers.ahead import Layer
from moeyard.runtime.layers.autograd import Leaving, send_rows
from moeyard.runtime.layers.counted import Together
from moeyard.runtime.layers.dispatch import (
    Route,
    Spread,
    combine,
    permute,
    plan_dispatch,
    summed,
)
from moeyard.runtime.layers.once import through_once
from moeyard.runtime.layers.replicas import Hosted, computed, gather_experts
from moeyard.runtime.roles import Hosts

CHUNK_SECONDS = 2e-3  # what a second chunk costs beside its rows: a split, a schedule, two programs
LEAST_GAIN = 0.97  # of the time in one go, from which on two chunks are worth it


class Compute(Protocol):
    """Rows grouped by expert through the experts hosted here."""

    def __call__(
        self,
        rows: torch.Tensor,
        route: Route,
        gathered: Sequence[torch.Tensor],
        hosted: Hosted | None,
        /,
    ) -> torch.Tensor: ...


def through_experts(
    yard: Hosts,
    layer: Layer,
    x_TD: torch.Tensor,
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    home_E: IntArray,
    compute: Compute,
    *,
    out: torch.dtype,
    told: Callable[[Demand], None],
) -> torch.Tensor:
    """x through the experts that index names, summed with the weights or plainly, in dtype `out`. told: hears the demand."""
    wanted = yard.options.chunks
    once = None
    if crossing.wanted(yard, index_TK.shape[1]):
        once = Together(weights_TK is not None and weights_TK.requires_grad)
        wanted = 1 if wanted == "auto" else wanted  # how many parts pay is not known of rows that cross once
    routes = plan_dispatch(
        x_TD,
        index_TK,
        yard,
        len(home_E),
        layer,
        home_E=home_E,
        chunks=2 if wanted == "auto" else int(wanted),
        choose=(lambda *known: worth(yard, *known)) if wanted == "auto" else None,
        once=once,
    )
    told(routes[0].demand if len(routes) == 1 else Demand(sum(route.demand.rows for route in routes)))
    count = len(routes)
    xs = x_TD.tensor_split(count)
    weights = [None] * count if weights_TK is None else list(weights_TK.tensor_split(count))
    placement = routes[0].placement

    def gathered() -> Any:
        return gather_experts(
            yard,
            placement,
            layer.stacks,
            layer.dtype,
            name=layer.name,
            site=layer.site,
            ahead=routes[0].begun,
        )

    if any(route.once is not None for route in routes):
        return torch.cat(_one_by_one(yard, routes, xs, weights, gathered, compute, out))
    if count == 1:
        rows = send_rows(_spread(xs[0], routes[0]), routes[0].plan, yard, agreed=True)
        stacks, hosted = gathered()
        rows = compute(permute(rows, routes[0].grouped), routes[0], stacks, hosted)
        computed(hosted)
        return combine(rows, routes[0], weights[0], out)
    return torch.cat(_in_turn(yard, routes, xs, weights, gathered, compute, out))


def _one_by_one(
    yard: Hosts,
    routes: Sequence[Route],
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    gathered: Callable[[], Any],
    compute: Compute,
    out: torch.dtype,
) -> list[torch.Tensor]:
    """Rows that cross once: a part's copies follow what crossed, so no part hides behind another."""
    experts: list[Any] = []

    def once_gathered() -> Any:
        if not experts:
            experts.append(gathered())
        return experts[0]

    done = []
    for route, x, weight in zip(routes, xs, weights, strict=True):
        if route.once is not None:
            done.append(through_once(yard, route, x, weight, once_gathered, compute, out))
            continue
        rows = permute(send_rows(_spread(x, route), route.plan, yard, agreed=True), route.grouped)
        stacks, hosted = once_gathered()
        done.append(combine(compute(rows, route, stacks, hosted), route, weight, out))
    computed(once_gathered()[1])
    return done


def _in_turn(
    yard: Hosts,
    routes: Sequence[Route],
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    gathered: Callable[[], Any],
    compute: Compute,
    out: torch.dtype,
) -> list[torch.Tensor]:
    rows = send_rows(_spread(xs[0], routes[0]), routes[0].plan, yard, agreed=True)
    stacks, hosted = None, None
    back: Leaving | None = None
    done: list[torch.Tensor] = []
    for i, route in enumerate(routes):
        following = None
        if i + 1 < len(routes):
            following = Leaving(_spread(xs[i + 1], routes[i + 1]), routes[i + 1].plan, yard)
        if stacks is None:
            stacks, hosted = gathered()
        results = compute(permute(rows, route.grouped), route, stacks, hosted)
        if following is not None:
            rows = following.arrived()
        if back is not None:
            done.append(summed(back.arrived(), routes[i - 1], weights[i - 1], out))
        order = None if route.grouped is None else route.grouped.reversed()
        back = Leaving(permute(results, order), route.plan, yard, backward=True)
    computed(hosted)
    assert back is not None
    done.append(summed(back.arrived(), routes[-1], weights[-1], out))
    return done


def _spread(x_TD: torch.Tensor, route: Route) -> torch.Tensor:
    return Spread.apply(x_TD, route.wire)  # type: ignore[no-untyped-call,no-any-return]


def worth(yard: Hosts, demand: Demand, served: Assignment, placement: Placement) -> int:
    """2 if two chunks take less than one, by what the yard was told of its model; from what all ranks know."""
    model = yard.options.model
    if model is None:
        return 1
    cluster = yard.cluster
    ports = ports_of(cluster)
    loads = kernel.transport(kernel.loads_of(writable(served.rows_RR), ports), ports)
    exchange = float(kernel.fastest(loads.forms, float(model.row_bytes))) if loads.level else 0.0
    experts = float((served.rows_R / cluster.speed).max()) * model.row_seconds
    whole = 2 * exchange + experts
    halves = exchange + max(exchange, experts) + CHUNK_SECONDS
    return 2 if halves < LEAST_GAIN * whole else 1
