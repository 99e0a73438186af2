"""Who hosts which expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import BoolArray, IntArray, Travels, frozen, writable
from moeyard.errors import InvalidPlacement
from moeyard.kernels.place.hosts import Hosts, hosts_of


@dataclass(frozen=True, eq=False)
class Placement(Travels):
    """home_E[e]: the rank that owns expert e. hosts_ER[e, r]: rank r holds e, as its home or as a replica."""

    home_E: IntArray
    hosts_ER: BoolArray
    planner: str = ""
    model_assumed: bool = False  # planned for the stand-in model, because none was given

    def __init__(
        self, home_E: ArrayLike, hosts_ER: ArrayLike, planner: str = "", *, model_assumed: bool = False
    ) -> None:
        home = _homes(home_E)
        hosts = np.array(hosts_ER, dtype=np.bool_)
        if hosts.ndim != 2 or home.shape != hosts.shape[:1]:
            raise InvalidPlacement(
                f"home {home.shape} and hosts {hosts.shape} must be [expert] and [expert, rank]"
            )
        bad = (home < 0) | (home >= hosts.shape[1])
        if bad.any():
            e = int(np.argmax(bad))
            raise InvalidPlacement(f"expert {e} has home {home[e]}, but ranks are 0..{hosts.shape[1] - 1}")
        missing = ~hosts[np.arange(len(home)), home]
        if missing.any():
            e = int(np.argmax(missing))
            raise InvalidPlacement(
                f"expert {e} is not hosted by its home, rank {home[e]}; set hosts_ER[{e}, {home[e]}]"
            )
        object.__setattr__(self, "home_E", frozen(home))
        object.__setattr__(self, "hosts_ER", frozen(hosts))
        object.__setattr__(self, "planner", planner)
        object.__setattr__(self, "model_assumed", model_assumed)

    @classmethod
    def of_homes(cls, home_E: ArrayLike, num_ranks: int, planner: str = "") -> Placement:
        """Every expert on its home alone."""
        home = _homes(home_E)
        return cls(home, home[:, None] == np.arange(num_ranks), planner)

    def assuming(self) -> Placement:
        """The same placement, marked as planned for the stand-in model."""
        return Placement(self.home_E, self.hosts_ER, self.planner, model_assumed=True)

    @property
    def num_experts(self) -> int:
        return int(self.hosts_ER.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.hosts_ER.shape[1])

    @cached_property
    def copies(self) -> int:
        """Replicas: hosts that are not homes."""
        return int(self.hosts_ER.sum()) - self.num_experts

    @cached_property
    def hosts(self) -> Hosts:
        """As kernels take it."""
        found: Hosts = hosts_of(writable(self.hosts_ER), writable(self.home_E))
        return found

    def within(self, slots: int) -> Placement:
        """The same placement, or an error if a rank holds more than `slots` replicas."""
        if int(self.replicas_R.max()) > slots:
            r = int(np.argmax(self.replicas_R))
            raise InvalidPlacement(
                f"rank {r} holds {self.replicas_R[r]} replicas but has {slots} slots; allow more slots or place anew"
            )
        return self

    @cached_property
    def replicas_R(self) -> IntArray:
        """Slots that each rank uses for replicas."""
        hosted = self.hosts_ER.sum(axis=0)
        return frozen(hosted - np.bincount(self.home_E, minlength=self.num_ranks))


def _homes(home_E: ArrayLike) -> IntArray:
    try:
        given = np.asarray(home_E)
        with np.errstate(invalid="ignore"):
            home: IntArray = np.array(given, dtype=np.int64)
        whole = given.dtype.kind in "iu" or bool((given == home).all())
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        told = " ".join(repr(home_E).split())
        raise InvalidPlacement(f"home_E holds {told:.80}; give the number of a rank for each expert")
    return home
