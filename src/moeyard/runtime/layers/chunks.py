"""A layer's tokens through their experts: dispatch, compute, combine; in one go, or in chunks that hide one another's exchanges.

    one          dispatch        experts           combine
    two          dispatch 1      experts 1         experts 2       combine 2
    behind                       dispatch 2        combine 1

Backwards autograd takes the nodes in the reverse of the order in which they were made, which is the same picture from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from moeyard.arrays import IntArray
from moeyard.assignment import Assignment
from moeyard.cost import chunks_worth
from moeyard.dedup import may_cross_once
from moeyard.demand import Demand
from moeyard.placement import Placement
from moeyard.runtime.block.compiled import recomputing
from moeyard.runtime.layers.ahead import Layer
from moeyard.runtime.layers.autograd import Leaving, send_rows
from moeyard.runtime.layers.counted import Together
from moeyard.runtime.layers.dispatch import Spread, combine, permute, summed
from moeyard.runtime.layers.once import through_once
from moeyard.runtime.layers.replicas import Hosted, computed, gather_experts
from moeyard.runtime.layers.routes import Route, plan_routes
from moeyard.runtime.roles import Hosts


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
    if may_cross_once(yard.cluster, yard.options.dedup, index_TK.shape[1]):
        once = Together(weights_TK is not None and weights_TK.requires_grad)
    routes = plan_routes(
        x_TD,
        index_TK,
        yard,
        len(home_E),
        layer,
        home_E=home_E,
        chunks=2 if wanted == "auto" else int(wanted),
        choose=(lambda *known: worth(yard, *known)) if wanted == "auto" else None,
        once=once,
        most=yard.options.most_rows,
    )
    count = len(routes)
    demand = routes[0].demand if count == 1 else Demand(sum(route.demand.rows for route in routes))
    told(demand)
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

    parts = [Part(*one) for one in zip(routes, xs, weights, strict=True)]
    hidden = count > 1 and all(route.once is None for route in routes)
    done = (_in_turn if hidden else _one_by_one)(yard, parts, gathered, compute, out)
    y = done[0] if count == 1 else torch.cat(done)
    yard.forecasts.start()
    # Told by what all ranks have agreed on: a router whose weights stay here may want gradients on one of them alone.
    agreed = x_TD.requires_grad or layer.trains or (once is not None and once.grad)
    if y.requires_grad and agreed and not recomputing():
        lands = yard.forecasts.flies(layer.site, demand)
        y.register_hook(lambda _: lands())  # type: ignore[no-untyped-call]
    return y


class Part(NamedTuple):
    """Some of a layer's tokens."""

    route: Route
    x: torch.Tensor
    weights: torch.Tensor | None


def _one_by_one(
    yard: Hosts, parts: Sequence[Part], gathered: Callable[[], Any], compute: Compute, out: torch.dtype
) -> list[torch.Tensor]:
    """A part alone; or several whose rows cross once: a part's copies follow what crossed, so none hides behind another."""
    experts: list[Any] = []

    def once_gathered() -> Any:
        if not experts:
            experts.append(gathered())
        return experts[0]

    done = []
    for route, x, weight in parts:
        if route.once is not None:
            done.append(through_once(yard, route, x, weight, once_gathered, compute, out))
            continue
        rows = send_rows(_spread(x, route), route.plan, yard, agreed=True)
        stacks, hosted = once_gathered()
        done.append(combine(compute(permute(rows, route.grouped), route, stacks, hosted), route, weight, out))
    computed(once_gathered()[1])
    return done


def _in_turn(
    yard: Hosts, parts: Sequence[Part], gathered: Callable[[], Any], compute: Compute, out: torch.dtype
) -> list[torch.Tensor]:
    """Each part's exchanges behind another's experts."""
    rows = send_rows(_spread(parts[0].x, parts[0].route), parts[0].route.plan, yard, agreed=True)
    stacks, hosted = None, None
    back: Leaving | None = None
    done: list[torch.Tensor] = []
    for i, (route, _, _) in enumerate(parts):
        following = None
        if i + 1 < len(parts):
            following = Leaving(_spread(parts[i + 1].x, parts[i + 1].route), parts[i + 1].route.plan, yard)
        if stacks is None:
            stacks, hosted = gathered()
        results = compute(permute(rows, route.grouped), route, stacks, hosted)
        if following is not None:
            rows = following.arrived()
        if back is not None:
            done.append(summed(back.arrived(), parts[i - 1].route, parts[i - 1].weights, out))
        order = None if route.grouped is None else route.grouped.reversed()
        back = Leaving(permute(results, order), route.plan, yard, backward=True)
    computed(hosted)
    assert back is not None
    done.append(summed(back.arrived(), parts[-1].route, parts[-1].weights, out))
    return done


def _spread(x_TD: torch.Tensor, route: Route) -> torch.Tensor:
    return Spread.apply(x_TD, route.wire)  # type: ignore[no-untyped-call,no-any-return]


def worth(yard: Hosts, demand: Demand, served: Assignment, placement: Placement) -> int:
    """How many parts take least, by what the yard was told of its model; from what all ranks know."""
    model = yard.options.model
    return 1 if model is None else chunks_worth(yard.cluster, model, served)
