"""What code asks of a yard: a role, not the Yard. Each has no more than its users need, so a test can play it.

Member      who and where am I
Crew        exchanges: agree on counts, plan, send
Hosts       a crew that also chooses hosts for experts, and computes
Company     process groups for what is not planned: gradients, losses, checkpoints; memory that layers share
Base        both: what a whole model needs
Links       a base whose rails can be measured
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.runtime.agree.agreement import Agreement
from moeyard.runtime.agree.ahead import Forecasts
from moeyard.runtime.agree.control import Control
from moeyard.runtime.agree.copies import Held
from moeyard.runtime.agree.floor import Floor
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.faults.flaws import Flaw
from moeyard.runtime.options import Options
from moeyard.runtime.transport.api import Pending, Transport
from moeyard.runtime.transport.behind import Behind
from moeyard.runtime.transport.buffers import Workspace
from moeyard.traffic import Traffic


class Member(Protocol):
    """One rank of an expert-parallel group."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...  # of the group, in the world's numbers
    @property
    def device(self) -> torch.device: ...


class Crew(Member, Protocol):
    """Ranks that exchange rows by plans they agree on."""

    @property
    def agreement(self) -> Agreement: ...

    def agree(
        self,
        kind: str,
        payload: Any,
        *,
        row_bytes: int = 0,
        dtype: int = 0,
        grad: int = 0,
        site: int = 0,
        homes: int = 0,
        flaw: Flaw | None = None,
        ahead: int = 0,
    ) -> IntArray: ...

    def plan(self, traffic: Traffic, also: int = 0, scheduler: str | None = None) -> Plan: ...

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, *, agreed: bool = False
    ) -> Pending: ...

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, *, agreed: bool = False
    ) -> None: ...


class Accelerator(Protocol):
    """Emulates one: called with the rows that go into and come out of the experts hosted here, and how many there are.

    Gives the rows back, differentiable; takes its time over it.
    """

    def start(self, rows: torch.Tensor, count: int) -> torch.Tensor: ...
    def finish(self, rows: torch.Tensor, count: int) -> torch.Tensor: ...


class Hosts(Crew, Protocol):
    """A crew that chooses hosts for experts, keeps replicas in memory that its layers share, and computes."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def options(self) -> Options: ...
    @property
    def workspace(self) -> Workspace: ...
    @property
    def accelerator(self) -> Accelerator | None: ...
    @property
    def checked(self) -> bool: ...
    def check_replicas(self, only: Held | None = None) -> int: ...
    def next_site(self) -> int: ...
    @property
    def behind(self) -> Behind: ...
    @property
    def forecasts(self) -> Forecasts: ...
    @property
    def closed(self) -> bool: ...


class Company(Member, Protocol):
    """Ranks and the groups that join them. Groups are new after a lost rail: take them when they are needed."""

    @property
    def control(self) -> Control: ...
    @property
    def dense_group(self) -> Any: ...
    @property
    def dense_control(self) -> Any: ...
    @property
    def data_group(self) -> Any: ...
    def floor(self, call: str, *, behind: bool = False) -> Floor: ...  # for a collective of all these ranks
    @property
    def workspace(self) -> Workspace: ...


class Base(Hosts, Company, Protocol):
    """All that an expert-parallel model needs."""


class Links(Base, Protocol):
    """A base whose transport sends messages outside any plan."""

    @property
    def transport(self) -> Transport: ...
