"""The yard: process groups, plans and memory of one expert-parallel group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from moeyard.choices import check_choices
from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster
from moeyard.model import ModelSpec
from moeyard.runtime.agree.control import Control, Frame, share_views, small_digest
from moeyard.runtime.agree.plans import CHAINS, Plan, PlanCache, cluster_digest, plan_digest
from moeyard.runtime.faults.errors import ExchangeError, Flaw, RailLost, RankLost, Watch, accuse
from moeyard.runtime.faults.rails import Meeting, common_rail, dead_in_group, hear, own_nic, without
from moeyard.runtime.transport.buffers import Arena, Workspace
from moeyard.runtime.transport.channels import RAIL_BACKEND, Channels, make_group, register_rail_backend
from moeyard.runtime.transport.detect import detect_cluster, lab_place, own_view
from moeyard.runtime.transport.gloo import Recorder
from moeyard.schedulers import schedule
from moeyard.traffic import Traffic
from moeyard.version import __version__

Observer = Callable[
    [int, int, int, int, int | None], None
]  # stage, src, dst, rows, rail (None inside a node)
FLIGHTS = 8  # exchanges of a yard that run behind their callers at once
_count = 0  # yards made by this process: their number names them in the store


class Yard:
    """Everything that the expert-parallel exchanges of one group need.

    `where`: a ProcessGroup (default: the whole world) or a DeviceMesh of one dimension (expert parallel) or two (data
    parallel x expert parallel, the last dimension or the one named "ep"). Every rank of the world makes the yard, with
    the same options; each expert-parallel group then exchanges for itself, and `data_group` joins the ranks that hold
    the same experts.

    planner, slots, policy: how experts get replicas ("static": none), and which copy serves a row. interfaces: on gloo,
    the network interface of each rail; management: one that is no rail, for control. In a lab the cluster and the
    interfaces are the lab's unless given (`interfaces=()`: none). timeout: seconds until a silent rank is an error.
    """

    def __init__(
        self,
        where: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        cluster: Cluster | str | None = None,
        scheduler: str = "auto",
        planner: str = "static",
        slots: int | None = None,
        policy: str = "auto",
        model: ModelSpec | None = None,
        interfaces: Sequence[str] | None = None,
        management: str | None = None,
        timeout: float = 300.0,
        observer: Observer | None = None,
    ) -> None:
        global _count
        check_choices(scheduler, planner, policy)
        _count += 1
        self.scheduler, self.planner, self.slots, self.policy = scheduler, planner, slots, policy
        self.model, self.timeout, self.observer = model, timeout, observer
        # Set these to: be told when every exchange and message began and ended; let a gloo group of all ranks carry the
        # rows by its own all-to-all, unplanned; emulate an accelerator by start(rows, count) and finish(rows, count)
        # about the experts.
        self.recorder: Recorder | None = None
        self.collective: Any = None
        self.pace: Any = None
        members, dense = _members(where)
        self.ranks = members  # global ranks, in expert-parallel order
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        self.backend = _backend(where)
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if self.backend == "nccl"
            else torch.device("cpu")
        )
        place = lab_place()
        given = Cluster.load(cluster) if isinstance(cluster, str) else cluster
        if given is None and place is not None:
            given = place.part(members)
        store = PrefixStore(f"moeyard/{_count}", dist.distributed_c10d._get_default_store())
        config = self._config(cluster_digest(given) if given is not None else 0)
        view = {"members": members, "dense": dense, "config": config, **own_view()}
        view["rails"] = None if given is None else given.rails.tolist()
        views = share_views(store, dist.get_rank(), view, range(dist.get_world_size()), timeout)
        self.cluster = given or detect_cluster([views[r] for r in members], self.device)
        if self.cluster.num_ranks != self.size:
            raise InvalidCluster(
                f"the expert-parallel group has {self.size} ranks, the cluster {self.cluster.nodes} nodes x "
                f"{self.cluster.ranks_per_node} = {self.cluster.num_ranks}; give the cluster of one such group"
            )
        self._digest = self._config(cluster_digest(self.cluster))
        if interfaces is None and place is not None and place.interfaces and self.backend == "gloo":
            fits = len(place.interfaces) == self.cluster.nics_per_node and self.cluster.nodes > 1
            interfaces = place.interfaces if fits else None
        self.interfaces = tuple(interfaces) if interfaces else None
        self.management = management or (place.management if place and self.interfaces else None)
        self._store, self.generation = store, 0  # grows with every recovery, when all groups are new
        self._families = {f: self._family_cluster(f, views) for f in _distinct(views, "members")}
        self._fellows = _distinct(views, "dense")
        self.plans, self.arena, self.workspace = PlanCache(), Arena(), Workspace()
        streams: Any = torch.cuda.Stream
        self.streams = [streams(self.device) for _ in range(1 + CHAINS)] if self.device.type == "cuda" else []
        self._fault_lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        """Everything that a lost rail takes with it: at start, and anew after `recover`."""
        self._make_groups()
        self.threads = ThreadPoolExecutor((FLIGHTS + 1) * CHAINS, thread_name_prefix="moeyard-chain")
        self.flights = ThreadPoolExecutor(FLIGHTS, thread_name_prefix="moeyard-flight")
        self._calls, self._tags, self._history = 0, 0, 0
        self._state = "idle"
        self._fault: ExchangeError | None = None
        watched = PrefixStore(f"g{self.ranks[0]}/{self.generation}", self._store)
        self._watch = Watch(watched, self.rank, self.whereabouts)
        self.channels.warm(self.device)
        self.closed = False

    def _family_cluster(self, family: tuple[int, ...], views: dict[int, dict[str, Any]]) -> Cluster:
        """Of any expert-parallel group: as ours, but for its rails."""
        rails = views[family[0]]["rails"]
        return self.cluster if rails is None or family == tuple(self.ranks) else self.cluster.but(rails=rails)

    def _make_groups(self) -> None:
        """All groups of all expert-parallel groups, in one order on every rank of the world."""
        families, fellows = list(self._families), self._fellows
        control = {f: self._control_group(f) for f in families}
        self.control = Control(control[tuple(self.ranks)], self.size, self.lost)
        self.channels = Channels(
            self._families, self.rank, self.cluster, self.backend, self.timeout, self.interfaces,
            self.control.group, self.management,
        )  # fmt: skip
        self._extra: list[dist.ProcessGroup] = [self.control.group]
        self._background: Any = None
        self.dense_group = self.dense_control = None
        self.data_group = None
        for fellow in fellows:
            own = [f for f in families if set(f) <= set(fellow)]
            if len({len(f) for f in own}) != 1 or sum(map(len, own)) != len(fellow):
                raise InvalidCluster(
                    f"ranks {list(fellow)} do not divide into expert-parallel groups of one size: {own}; "
                    f"give every rank a group of the same size"
                )
            group = self._wide_group(fellow)
            apart = self.backend != "gloo" or self.management is not None
            plain = self._control_group(fellow) if apart else group
            if dist.get_rank() in fellow:
                self.dense_group, self.dense_control = group, plain
                self._extra += [group] if plain is group else [group, plain]
            for position in range(len(own[0]) if len(own) > 1 else 0):
                data = [f[position] for f in own]
                group = self._wide_group(data)
                if dist.get_rank() in data:
                    self.data_group = group
                    self._extra.append(group)

    @property
    def background_group(self) -> Any:
        """A gloo group of its own, for what runs behind the training and must never meet its collectives. Made when first used, by
        all ranks at once."""
        if self._background is None:
            self._background = dist.new_group(
                dist.get_process_group_ranks(self.dense_control),
                timeout=timedelta(seconds=self.timeout),
                backend="gloo",
                use_local_synchronization=True,
            )
            self._extra.append(self._background)
        return self._background

    def _control_group(self, ranks: Sequence[int]) -> Any:
        """For small values: on the management interface where there is one, so that no rail matters."""
        if self.management is None:
            return make_group(ranks, "gloo", self.timeout)
        register_rail_backend()
        return make_group(ranks, RAIL_BACKEND, self.timeout, self.management)

    def _wide_group(self, ranks: Sequence[int]) -> Any:
        """For gradients, between any ranks: each on its own rail, or on one that lives on every node."""
        if self.interfaces is None:
            return make_group(ranks, self.backend, self.timeout)
        register_rail_backend()
        rails = np.min([c.rails.min(axis=0) for c in self._families.values()], axis=0)
        shared = self.cluster.but(rails=np.broadcast_to(rails, self.cluster.rails.shape))
        rail = common_rail(shared, self.cluster.nic(self.rank)[1])
        name = self.management if rail is None else self.interfaces[rail]
        return make_group(ranks, RAIL_BACKEND if name else self.backend, self.timeout, name)

    def _config(self, cluster: int) -> int:
        return small_digest(
            __version__, cluster, self.scheduler, self.planner, self.slots, self.policy, self.model
        )

    # plans

    def agree(
        self,
        kind: str,
        payload: Any,
        *,
        row_bytes: int = 0,
        dtype: int = 0,
        grad: bool = False,
        site: int = 0,
        flaw: Flaw | None = None,
    ) -> Any:
        """One small gather: [rank, value], or Mismatch on every rank."""
        self.check_open()
        self._calls += 1
        self._state = kind
        frame = Frame(kind, self._calls, self._digest, self._history, row_bytes, dtype, int(grad), site, flaw)
        values = self.control.agree(frame, np.asarray(payload, dtype=np.int64))
        self._state = "idle"
        return values

    def plan(self, traffic: Traffic, also: int = 0) -> Plan:
        """The plan of this traffic, from the cache or made now and compared with the other ranks'. `also`: another digest
        that must agree. Every rank calls this with the same traffic."""
        key = PlanCache.key(traffic, also)
        plan = self.plans.get(key)
        if plan is None:
            made = schedule(self.cluster, traffic, self.scheduler)
            plan = Plan(made, self.rank, plan_digest(made))
            finish = self.control.agree_digest(small_digest(plan.digest, also))
            _ = plan.forward  # lowered while the digests travel
            finish()
            self.plans.put(key, plan)
        self._history = small_digest(self._history, plan.digest, also)
        return plan

    def next_tag(self, plan: Plan, backward: bool) -> int:
        """A tag that no other exchange in flight has: a rank in another exchange can then never deliver its rows here."""
        self.check_open()
        self._tags += 1
        return small_digest(plan.digest, backward, self._tags)

    # faults

    def mark_dead(self, node: int, rail: int) -> None:
        """Plan around a dead nic from now on. Every rank of the yard calls this between the same two exchanges."""
        if not (0 <= node < self.cluster.nodes and 0 <= rail < self.cluster.nics_per_node):
            raise InvalidCluster(
                f"no nic {rail} on node {node}: nodes are 0..{self.cluster.nodes - 1}, rails 0..{self.cluster.nics_per_node - 1}"
            )
        self.set_cluster(without(self.cluster, [(node, rail)]))

    def set_cluster(self, cluster: Cluster) -> None:
        """Plan for these rates and rails from now on; nodes and ranks stay as they are. Every rank calls this."""
        shape = (self.cluster.nodes, self.cluster.ranks_per_node, self.cluster.nics_per_node)
        if (cluster.nodes, cluster.ranks_per_node, cluster.nics_per_node) != shape:
            raise InvalidCluster(f"the yard's groups are for (nodes, ranks, nics) {shape}; make a new Yard")
        self.cluster = cluster
        self._families[tuple(self.ranks)] = cluster
        self._digest = self._config(cluster_digest(cluster))
        self.channels.retarget(cluster)
        self.plans.clear()

    def whereabouts(self) -> dict[str, Any]:
        return {"call": self._calls, "tag": self._tags, "state": self._state}

    def lost(self, cause: str, pair: tuple[int, int] | None = None) -> ExchangeError:
        """The error of a failed exchange, after a roll call. The yard is of no use from now on, or until `recover`."""
        with self._fault_lock:
            if self._fault is not None:
                return type(self._fault)(str(self._fault))
            where = self.whereabouts()
            railed = self.interfaces is not None
            self._fault = accuse(self._watch, self.rank, range(self.size), where, cause, pair, railed)
            return self._fault

    def settle(self) -> None:
        """Wait until every rank of the world is here, over the control network: before the optimizer steps, say, so that all
        notice a lost rail while the step can still be repeated."""
        self.check_open()
        self._state = "settle"
        try:
            dist.barrier(group=self.dense_control)
        except RuntimeError as error:
            raise self.lost(str(error)) from error
        self._state = "idle"

    def recover(self, error: BaseException, *, seconds: float = 2.0) -> list[tuple[int, int]]:
        """After a lost rail: find the dead nics with all ranks, plan around them, make the groups anew.

        Every rank of the world calls this with the error that it got: RailLost, or a RuntimeError of torch from a
        collective outside the yard; any other error is raised again. Gives the (node, rail) that died, alike on all ranks of
        the group; raises RankLost if none did. What was under way is lost: repeat the step from its beginning.
        seconds: how long the ranks listen on their nics.
        """
        if self.interfaces is None or not isinstance(error, (RailLost, RuntimeError)):
            raise error
        if self._fault is None:
            self.lost(str(error))
        if isinstance(self._fault, RankLost):
            raise self._fault
        self.generation += 1
        store = PrefixStore(f"recover/{self.generation}", self._store)
        patience = 2 * self.timeout + 10  # others may still wait in an exchange, each for its own time-out
        meeting = Meeting(store, dist.get_rank(), range(dist.get_world_size()), patience)
        found = hear(
            meeting, dist.get_rank(), *own_nic(self.cluster, self.ranks, self.rank, self.interfaces), seconds
        )
        dead = {f: dead_in_group(f, cluster, found) for f, cluster in self._families.items()}
        if not any(dead.values()):
            raise RankLost(
                f"{error}; every rail carries messages now: raise timeout= if the network is only slow"
            )
        self._shut()
        self._families = {f: without(cluster, dead[f]) for f, cluster in self._families.items()}
        self.cluster = self._families[tuple(self.ranks)]
        self._digest = self._config(cluster_digest(self.cluster))
        self._open()
        return dead[tuple(self.ranks)]

    def check_open(self) -> None:
        if self._fault is not None:
            fix = "call recover" if isinstance(self._fault, RailLost) else "make a new one"
            raise type(self._fault)(f"this yard is of no use after: {self._fault}; {fix}")
        if self.closed:
            raise RankLost("this yard is closed; make a new one")

    def close(self) -> None:
        """Finish what runs and destroy the groups that the yard made. Every rank calls this; twice is once."""
        if not self.closed:
            self._shut()

    def _shut(self) -> None:
        self.closed = True
        self._watch.close()
        self.flights.shutdown(wait=True)
        self.threads.shutdown(wait=True)
        self.arena.clear()
        self.workspace.clear()
        self.plans.clear()
        self.channels.close()
        for group in self._extra:
            dist.destroy_process_group(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model exchanges over the same yard."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _members(where: dist.ProcessGroup | DeviceMesh | None) -> tuple[list[int], list[int]]:
    """(ranks of this expert-parallel group, ranks over which the dense parameters are copies)."""
    world = list(range(dist.get_world_size()))
    if not isinstance(where, DeviceMesh):
        return (world if where is None else list(dist.get_process_group_ranks(where))), world
    dense: list[int] = where.mesh.flatten().tolist()
    if where.ndim == 1:
        return list(dense), dense
    if where.ndim != 2:
        raise InvalidCluster(
            f"the mesh has {where.ndim} dimensions; slice out (data parallel, expert parallel) or one dimension"
        )
    names = where.mesh_dim_names or ()
    ep = names.index("ep") if "ep" in names else 1
    rows: list[list[int]] = (where.mesh if ep == 1 else where.mesh.T).tolist()
    return next(row for row in rows if dist.get_rank() in row), dense


def _distinct(views: dict[int, dict[str, Any]], key: str) -> list[tuple[int, ...]]:
    return sorted({tuple(view[key]) for view in views.values()})


def _backend(where: dist.ProcessGroup | DeviceMesh | None) -> str:
    """gloo or nccl: the one that carries tensors of the mesh's device, or of the group."""
    if isinstance(where, DeviceMesh):
        return "nccl" if where.device_type == "cuda" else "gloo"
    name = str(dist.get_backend(where))
    if "nccl" in name:
        return "nccl"
    if "gloo" in name:
        return "gloo"
    raise InvalidCluster(
        f"backend {name!r} is neither gloo nor nccl; start the process group with one of them"
    )
