"""Plans, simulates and runs the communication of expert-parallel Mixture-of-Experts training.

    cluster = Cluster.load("h200-4x8")
    demand -> place -> assign -> Traffic -> schedule -> lower -> Program

The names below are the public ones. Nothing here imports torch; `moeyard.runtime` does.
"""

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
from moeyard.schedule import Schedule
from moeyard.schedulers import SCHEDULERS, schedule  # after moeyard.schedule: the function keeps the name
from moeyard.sim import simulate
from moeyard.sim.step import simulate_step
from moeyard.timeline import Timeline
from moeyard.trace import Trace
from moeyard.traffic import Traffic
from moeyard.verify import verify
from moeyard.version import __version__
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
    "PLANNERS",
    "Placement",
    "Port",
    "Program",
    "SCHEDULERS",
    "Schedule",
    "StepCost",
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
