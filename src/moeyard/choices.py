"""The names a user chooses by: of a scheduler, a planner, an assignment policy."""

from __future__ import annotations

from moeyard.assign import POLICIES
from moeyard.errors import UnknownName
from moeyard.planners import PLANNERS
from moeyard.schedulers import SCHEDULERS


def check_choices(scheduler: str, planner: str, policy: str) -> None:
    """UnknownName, with what there is, for the first that does not exist."""
    for kind, name, known in (
        ("scheduler", scheduler, SCHEDULERS),
        ("planner", planner, PLANNERS),
        ("assignment policy", policy, POLICIES),
    ):
        if name not in known:
            raise UnknownName.of(kind, name, known)
