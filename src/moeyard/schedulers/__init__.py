"""traffic -> Schedule. One function per scheduler; `schedule` calls them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moeyard.cluster import Cluster
from moeyard.errors import InvalidTraffic, UnknownName
from moeyard.estimate import fan_seconds
from moeyard.forms.fanned import Fanned
from moeyard.schedule import Schedule
from moeyard.schedulers.auto import schedule_auto
from moeyard.schedulers.direct import schedule_direct, schedule_ecmp
from moeyard.schedulers.lanes import (
    schedule_fast,
    schedule_rails,
    schedule_shot,
    schedule_shunt,
    schedule_spread,
    schedule_waves,
)
from moeyard.schedulers.lpt import schedule_lpt
from moeyard.schedulers.wan import schedule_wan
from moeyard.traffic import Traffic
from moeyard.verify import check_fits

Scheduler = Callable[[Cluster, Traffic], Schedule]

SCHEDULERS: dict[str, Scheduler] = {
    "auto": schedule_auto,
    "direct": schedule_direct,
    "ecmp": schedule_ecmp,
    "fast": schedule_fast,
    "lpt": schedule_lpt,
    "rails": schedule_rails,
    "shot": schedule_shot,
    "shunt": schedule_shunt,
    "spread": schedule_spread,
    "wan": schedule_wan,
    "waves": schedule_waves,
}


def schedule(cluster: Cluster, traffic: Traffic, scheduler: str = "auto") -> Schedule:
    """Who sends which rows to whom when, by the named scheduler. Where rows cross to a node once, it says how they cross; the
    copies follow in a stage of their own."""
    if scheduler not in SCHEDULERS:
        raise UnknownName.of("scheduler", scheduler, SCHEDULERS)
    check_fits(cluster, traffic)
    if traffic.fan is None:
        made = SCHEDULERS[scheduler](cluster.priced, traffic)
        return made if cluster.priced is cluster else replace(made, cluster=cluster)
    if traffic.back:
        raise InvalidTraffic(
            "traffic of the way back, where rows are added up before they leave a node, is not scheduled by itself; "
            "schedule the way there, and take its reversed()"
        )
    first = SCHEDULERS[scheduler](cluster.priced, traffic.once)
    more = fan_seconds(cluster, traffic)
    considered = tuple((name, seconds + more) for name, seconds in first.considered)
    return Schedule(cluster, traffic, Fanned(cluster, traffic, first.form), first.scheduler, considered)
