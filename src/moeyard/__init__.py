"""Plans, simulates and runs the communication of expert-parallel Mixture-of-Experts training.

    cluster = Cluster.load("h200-4x8")
    demand -> place -> assign -> Traffic -> schedule -> lower -> Program

The names below are the public ones. Nothing here imports torch; `moeyard.runtime` does.
They are imported when they are first used: a command that plans nothing should not wait for the compiler.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moeyard.version import __version__

if TYPE_CHECKING:
    from moeyard.assign import ASSIGNERS, assign
    from moeyard.assignment import Assignment
    from moeyard.bounds import bound
    from moeyard.cluster import Cluster, Contention, Port
    from moeyard.cost import StepCost, step_cost
    from moeyard.demand import Demand
    from moeyard.errors import (
        InvalidCluster,
        InvalidDemand,
        InvalidFile,
        InvalidModel,
        InvalidPlacement,
        InvalidSchedule,
        InvalidTraffic,
        MoeyardError,
        NotSaved,
        UnknownName,
    )
    from moeyard.estimate import estimate
    from moeyard.execute import run_local
    from moeyard.formats import (
        load_demand,
        load_traffic,
        save_cluster,
        save_demand,
        save_trace,
        save_traffic,
    )
    from moeyard.formats.models import load_model
    from moeyard.formats.schedules import load_schedule, save_schedule
    from moeyard.formats.traces import find_trace as load_trace
    from moeyard.lower import lower
    from moeyard.migration import Migration
    from moeyard.model import ModelSpec
    from moeyard.placement import Placement
    from moeyard.planners import PLANNERS, place
    from moeyard.program import Program
    from moeyard.routing import Routing
    from moeyard.schedule import Schedule
    from moeyard.schedulers import SCHEDULERS, schedule
    from moeyard.sim import simulate
    from moeyard.sim.step import simulate_step
    from moeyard.stepplan import StepPlan
    from moeyard.steps import plan_step
    from moeyard.timeline import Timeline
    from moeyard.trace import Trace
    from moeyard.traffic import Traffic
    from moeyard.verify import verify
    from moeyard.workloads import workload

__all__ = [
    "ASSIGNERS",
    "Assignment",
    "Cluster",
    "Contention",
    "Demand",
    "InvalidCluster",
    "InvalidDemand",
    "InvalidFile",
    "InvalidModel",
    "InvalidPlacement",
    "InvalidSchedule",
    "InvalidTraffic",
    "Migration",
    "ModelSpec",
    "MoeyardError",
    "NotSaved",
    "PLANNERS",
    "Placement",
    "Port",
    "Program",
    "Routing",
    "SCHEDULERS",
    "Schedule",
    "StepCost",
    "StepPlan",
    "Timeline",
    "Trace",
    "Traffic",
    "UnknownName",
    "__version__",
    "assign",
    "bound",
    "estimate",
    "load_demand",
    "load_model",
    "load_schedule",
    "load_trace",
    "load_traffic",
    "lower",
    "place",
    "plan_step",
    "run_local",
    "save_cluster",
    "save_demand",
    "save_schedule",
    "save_trace",
    "save_traffic",
    "schedule",
    "simulate",
    "simulate_step",
    "step_cost",
    "verify",
    "workload",
]

_NAMES = {
    "assign": ("ASSIGNERS", "assign"),
    "assignment": ("Assignment",),
    "bounds": ("bound",),
    "cluster": ("Contention", "Port"),
    "cost": ("StepCost", "step_cost"),
    "demand": ("Demand",),
    "errors": (
        "InvalidCluster",
        "InvalidDemand",
        "InvalidFile",
        "InvalidModel",
        "InvalidPlacement",
        "InvalidSchedule",
        "InvalidTraffic",
        "MoeyardError",
        "NotSaved",
        "UnknownName",
    ),
    "estimate": ("estimate",),
    "execute": ("run_local",),
    "formats": ("load_demand", "load_traffic", "save_cluster", "save_demand", "save_trace", "save_traffic"),
    "formats.clusters": ("Cluster",),  # which puts `load` on it
    "formats.models": ("load_model",),
    "formats.schedules": ("load_schedule", "save_schedule"),
    "formats.steps": ("StepPlan",),  # which puts `save` and `load` on it
    "formats.timelines": ("Timeline",),  # which puts `save`, `load` and `to_chrome` on it
    "formats.traces": ("load_trace",),
    "lower": ("lower",),
    "migration": ("Migration",),
    "model": ("ModelSpec",),
    "placement": ("Placement",),
    "planners": ("PLANNERS", "place"),
    "program": ("Program",),
    "routing": ("Routing",),
    "schedule": ("Schedule",),
    "schedulers": ("SCHEDULERS", "schedule"),
    "sim": ("simulate",),
    "sim.step": ("simulate_step",),
    "steps": ("plan_step",),
    "trace": ("Trace",),
    "traffic": ("Traffic",),
    "verify": ("verify",),
    "workloads": ("workload",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moeyard' has no attribute {name!r}")
    value = getattr(import_module(f"moeyard.{_HOME[name]}"), "find_trace" if name == "load_trace" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Some functions have the name of their module: importing the module must not take the name away."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        """By name: what sends functions to other processes sends the modules they use too."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
