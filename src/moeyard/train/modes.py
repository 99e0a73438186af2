"""The ways of running one job that a training run compares, and what separates each from the next. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moeyard.errors import UnknownName

_HOME = {"planner": "static", "policy": "home"}
_EACH = {"dedup": False}  # every row for itself
_BEFORE = {"ahead": False, "chunks": 1}  # all in the foreground
_PARTS = {
    "ahead": False,
    "chunks": "auto",
}  # rows in two parts, each behind the other's experts, where that pays
_IN_TURN = {
    "ahead": True,
    "overlap": False,
    "chunks": "auto",
}  # planned for the next step; gathered and reduced in the foreground
_BEHIND = {
    "ahead": True,
    "chunks": "auto",
}  # the same, behind the rest too
CODEC = "bits:1"  # of modes that have one, unless another is asked for

# name -> (what it is, options of the yard; what is not named is as the run was asked for)
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (
        "expert parallelism by all_to_all_single, experts at home",
        {"scheduler": "direct", **_HOME, **_EACH, "transport": "collective"},
    ),
    "direct": (
        "each row on its destination's rail, experts at home",
        {"scheduler": "direct", **_HOME, **_EACH},
    ),
    "home": ("planned exchanges, experts at home", _HOME),
    "replicas": (
        "replicas of hot experts, each row on its destination's rail, in the foreground",
        {"scheduler": "direct", **_EACH, **_BEFORE},
    ),
    "shadow": (
        "planned exchanges; hot experts shadowed on every rank, in the foreground",
        {"planner": "shadow", "policy": "own", **_BEFORE},
    ),
    "prophet": (
        "planned exchanges; replicas by Pro-Prophet's planner, ahead",
        {"planner": "prophet", "policy": "own", **_BEHIND},
    ),
    "domains": (
        "planned exchanges; experts gathered inside domains instead of rows crossing, ahead and behind",
        {"planner": "domains", "policy": "auto", "slots": None, **_BEHIND},
    ),
    "domains-sync": (
        "planned exchanges; experts gathered inside domains, in the foreground",
        {"planner": "domains", "policy": "auto", "slots": None, **_PARTS},
    ),
    "domains+codec": (
        "domains, ahead and behind; experts cross between datacenters in few bytes (--codec)",
        {"planner": "domains", "policy": "auto", "slots": None, "codec": CODEC, **_BEHIND},
    ),
    "auto+codec": (
        "auto, with experts that cross between datacenters in few bytes (--codec)",
        {"planner": "auto", "policy": "auto", "slots": None, "codec": CODEC, **_BEHIND},
    ),
    "auto": (
        "planned exchanges; replicas or domains, whatever is predicted to take least, ahead and behind",
        {"planner": "auto", "policy": "auto", "slots": None, **_BEHIND},
    ),
    "sync": ("planned exchanges, replicas of hot experts, in the foreground", _BEFORE),
    "chunks": (
        "planned exchanges, replicas of hot experts, in the foreground; rows in two parts where it pays",
        _PARTS,
    ),
    "serial": (
        "planned exchanges, replicas of hot experts, planned ahead; gathers and reduces in the foreground",
        _IN_TURN,
    ),
    "all": ("planned exchanges, replicas of hot experts, ahead and behind", _BEHIND),
    "moeyard": ("planned exchanges, replicas of hot experts, ahead and behind", _BEHIND),
}
CODED = tuple(
    name for name, (_, options) in MODES.items() if "codec" in options
)  # for several datacenters only
# moeyard is `all` by the name of the whole
EVERY = tuple(name for name in MODES if name not in ("moeyard", *CODED))
SETS = {
    "both": ("plain", "moeyard"),
    "wan": ("plain", "direct", "domains", "domains+codec", "auto"),
    "all-of-them": EVERY,
}

# From plain to everything: what each mode adds to the one before it.
CHAIN = (
    ("plain", ""),
    ("direct", "engine"),
    ("home", "schedule"),
    ("sync", "replicas"),
    ("chunks", "chunks"),
    ("serial", "forecast"),
    ("all", "overlap"),
)

# What is chosen as a whole, beside the chain's beginning: mode -> what the comparison is called.
WHOLES = {
    "domains": "domains",
    "domains+codec": "domains and codec",
    "auto": "joint choice",
    "auto+codec": "joint choice and codec",
}
FOREGROUND = {
    "all": "serial",
    "moeyard": "serial",
    "domains": "domains-sync",
}  # the same, with nothing behind


def modes_of(given: Iterable[str]) -> tuple[str, ...]:
    """Names, sets of names and lists with commas -> names, each once."""
    found: dict[str, None] = {}
    for text in given:
        for name in text.split(","):
            if name not in SETS and name not in MODES:
                raise UnknownName.of("mode", name, [*MODES, *SETS])
            found.update(dict.fromkeys(SETS.get(name, (name,))))
    return tuple(found)
