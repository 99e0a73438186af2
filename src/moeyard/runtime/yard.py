"""The yard: everything that the exchanges of one expert-parallel group need, each part an object of its own.

    options      how it plans                          options.py
    world        ranks, clusters, interfaces           transport/world.py
    groups       process groups                        transport/groups.py
    guard        what went wrong, and where ranks are  faults/guard.py
    agreement    counts, order of calls, plans         agree/agreement.py
    transport    what carries the rows                 transport/api.py
    links        how they were measured, if they were  transport/links.py
    workspace    memory for replicas                   transport/buffers.py

A lost rail takes groups, guard, agreement and transport with it; `recover` makes them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster
from moeyard.formats import load_cluster
from moeyard.model import ModelSpec
from moeyard.runtime.agree.agreement import Agreement, Asked
from moeyard.runtime.agree.ahead import Forecasts
from moeyard.runtime.agree.control import Control
from moeyard.runtime.agree.copies import Held, compare_copies
from moeyard.runtime.agree.floor import Floor, Floors
from moeyard.runtime.agree.plans import Plan, PlanCache
from moeyard.runtime.agree.watcher import Watcher
from moeyard.runtime.codec.spec import written
from moeyard.runtime.faults.client import own_client
from moeyard.runtime.faults.errors import Mismatch, RailLost, RankLost
from moeyard.runtime.faults.guard import Guard
from moeyard.runtime.faults.hear import Meeting, find_dead
from moeyard.runtime.faults.rails import without
from moeyard.runtime.options import OFF, Options, in_force, switched_off
from moeyard.runtime.roles import Accelerator
from moeyard.runtime.transport.api import Deck, Observer, Pending, Transport
from moeyard.runtime.transport.behind import behind_of
from moeyard.runtime.transport.both_ways import compare_both_ways, some_traffic
from moeyard.runtime.transport.buffers import Workspace
from moeyard.runtime.transport.channels import Channels
from moeyard.runtime.transport.collective import Collective
from moeyard.runtime.transport.detect import lab_place
from moeyard.runtime.transport.family import choose_transport
from moeyard.runtime.transport.groups import Groups
from moeyard.runtime.transport.links import MEASURE, Known, Probe, know_links
from moeyard.runtime.transport.memory import Call, Memory, memory_of
from moeyard.runtime.transport.world import Wanted, Where, device_of, members_of, see_world
from moeyard.traffic import Traffic

_count = 0  # yards made by this process: their number names them in the store


class Yard:
    """Everything that the expert-parallel exchanges of one group need.

    `where`: a ProcessGroup (default: the whole world) or a DeviceMesh of one dimension (expert parallel) or two (data parallel x expert
    parallel, the last dimension or the one named "ep"). Every rank of the world makes the yard, with the same options; each
    expert-parallel group then exchanges for itself, and `data_group` joins the ranks that hold the same experts.

    cluster: a Cluster, a file or a preset; "measure": as the lab or the launcher shows it, with links measured now or found in the
    cache (see `links`). planner, slots, policy: how experts get replicas ("static": none), and which copy serves a row. interfaces: on gloo,
    the network interface of each rail; management: one that is no rail, for control. In a lab the cluster and the
    interfaces are the lab's unless given (`interfaces=()`: none). timeout: seconds until a silent rank is an error. transport:
    "collective" has torch's own all-to-all carry the rows, unplanned; default the backend's way of carrying out plans. ahead:
    replicas are planned from the counts of the calls before and gathered while the layer before computes, their gradients reduced
    behind the backward pass; False: on this very call's counts, on the spot. overlap: False: the same plans, gathered and reduced on the
    spot: what hiding saves is measured against it. resident: each layer has memory of its own for replicas;
    False: all layers share room for two. chunks: 2 sends one half of the tokens while the experts compute the other, "auto" where
    `model` says that it pays. dedup: a token crosses to a node once and is handed round there, its results come back as one sum; "auto"
    where the cluster says that it pays. codec: how experts travel between datacenters: "bits:1", "pick:8", ... (codec/spec.py). most_rows:
    that a rank may receive at once; beyond it tokens go in parts. checked: replicas are compared with their homes before every use.
    observer: called with (stage, src, dst, rows, rail) of each message sent. watcher: told of every gather, plan and finished exchange,
    with times. accelerator: emulates one about the experts of a Hugging Face model.
    """

    # No others: what is set on a yard from outside and read by nobody is an error, not silence.
    __slots__ = (
        "__weakref__", "_client", "_observer", "_sites", "_store", "_transport_of", "_watcher", "accelerator", "agreement", "behind",
        "device", "floors", "forecasts", "generation", "groups", "guard", "links", "options", "rank", "size", "transport", "workspace",
        "world",
    )  # fmt: skip

    def __init__(
        self,
        where: Where = None,
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
        transport: str | None = None,
        checked: bool = False,
        ahead: bool = True,
        resident: bool = True,
        chunks: int | str = 1,
        dedup: bool | str = False,
        codec: str | Mapping[int, str] | None = None,
        most_rows: int | None = None,
        overlap: bool = True,
        observer: Observer | None = None,
        watcher: Watcher | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        global _count
        _count += 1
        self.options = in_force(Options(
            scheduler, planner, slots, policy, model, transport, checked, ahead, resident, chunks, dedup, written(codec), most_rows, overlap
        ))  # fmt: skip
        self._observer, self._watcher, self.accelerator = observer, watcher, accelerator
        place = lab_place()
        measured = isinstance(cluster, str) and cluster == MEASURE
        given = None if measured else load_cluster(cluster) if isinstance(cluster, str) else cluster
        if given is None and place is not None:
            given = place.part(members_of(where)[0])
        self._store = PrefixStore(f"moeyard/{_count}", dist.distributed_c10d._get_default_store())
        wanted = Wanted(where, given, interfaces, management, timeout, place)
        self.world = see_world(self._store, wanted, self.options.digest(given))
        self._client = own_client(self._store, dist.get_rank(), first=0)
        self.rank, self.size = self.world.rank, len(self.world.ranks)
        self.device = device_of(self.world.backend)
        self._transport_of = choose_transport(self.options.transport, self.world.backend)
        if switched_off() and dist.get_rank() == 0:
            print(OFF, file=sys.stderr, flush=True)
        self.generation = self._sites = 0  # the one grows with every recovery, when all groups are new
        self.workspace = Workspace(resident)
        self._open()
        self.links: Known | None = self._know_links() if measured else None

    def _open(self) -> None:
        """Everything that a lost rail takes with it: at start, and anew after `recover`."""
        world, fellow = self.world, self.world.fellow
        store = PrefixStore(f"g{fellow[0]}/{self.generation}", self._client)
        self.guard = Guard(store, dist.get_rank(), fellow, world.timeout, world.railed, self.ranks[0])
        self.groups = self.guard.watched(
            "making groups", lambda: Groups(world, self.options.transport == "collective")
        )
        control = Control(self.groups.control, self.ranks, self.guard.lost)
        dense = Control(self.dense_control, fellow, self.guard.lost)
        self.floors = Floors(dense, self.guard, lambda: self.groups.background)
        self.agreement = Agreement(control, self.guard, self.rank, self._watcher)
        self.forecasts = Forecasts(self._watcher)
        self._plan_for(self.cluster)
        self.transport = self._transport_of(self._deck(self._observer, self._watcher))
        if self.device.type == "cuda":
            self.guard.keep_vigil(self.groups.abort)
        self.guard.watched("warming groups", lambda: self.groups.warm(self.device, self.guard.note))
        self.behind = behind_of(self.options, self.transport, self.exchange, self._apart)
        self.settle()  # nobody leaves, for whatever reason, while another still connects

    def _know_links(self) -> Known:
        deck = self._deck()
        with closing(choose_transport(None, self.world.backend)(deck)) as carries:
            probe = Probe(deck, self.control, carries, self.cluster)
            found, known = self.guard.watched(
                "measuring links", lambda: know_links(probe, self.world.interfaces)
            )
        self.set_cluster(found)
        return known

    def _deck(self, observer: Observer | None = None, watcher: Watcher | None = None) -> Deck:
        return Deck(self.rank, self.device, self.groups.whole, self.channels, self.guard, observer, watcher)

    def _apart(self) -> Transport:
        """On communicators of its own, for what runs behind the rows on a device."""
        channels = self.guard.watched("making groups", lambda: self.groups.behind)
        self.guard.watched("warming groups", lambda: channels.warm(self.device, self.guard.note))
        return self._transport_of(replace(self._deck(self._observer), channels=channels))

    def _plan_for(self, cluster: Cluster) -> None:
        self.options.check_for(cluster)
        self.forecasts.forget()
        self.workspace.begun = None
        self.agreement.plan_for(cluster, self.options.scheduler, self.options.digest(cluster))

    # what roles ask for

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, in expert-parallel order."""
        return self.world.ranks

    @property
    def cluster(self) -> Cluster:
        return self.world.cluster

    @property
    def control(self) -> Control:
        return self.agreement.control

    @property
    def channels(self) -> Channels:
        return self.groups.channels

    @property
    def plans(self) -> PlanCache:
        return self.agreement.plans

    @property
    def dense_group(self) -> Any:
        return self.groups.dense

    @property
    def dense_control(self) -> Any:
        return self.groups.dense_control

    @property
    def data_group(self) -> Any:
        return self.groups.data

    def floor(self, call: str, *, behind: bool = False) -> Floor:
        """For a collective of all ranks that share the dense parameters; `behind` the training: on a group of its own."""
        return self.floors.floor(call, behind=behind)

    @property
    def checked(self) -> bool:
        return self.options.checked

    @property
    def closed(self) -> bool:
        return self.guard.closed

    # plans and exchanges

    def agree(self, kind: str, payload: Any, **about: Any) -> IntArray:
        """One small gather: [rank, value], or Mismatch on every rank. about: see `Agreement.agree`."""
        return self.agreement.agree(kind, payload, **about)

    def plan(self, traffic: Traffic, also: int = 0, scheduler: str | None = None) -> Plan:
        """The plan of this traffic, from the cache or made now and compared with the other ranks'. `also`: another digest
        that must agree. scheduler: one that was chosen before. Every rank calls this with the same traffic."""
        return self.agreement.plans_of([Asked(traffic, also)], scheduler)[0]

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, *, agreed: bool = False
    ) -> Pending:
        """Begin the exchange; both tensors are contiguous and stay untouched until the wait."""
        self._check_rows(source)
        self.guard.where.enter("an exchange")
        try:
            return self.transport.start(plan, backward, output, source, agreed)
        finally:
            self.guard.where.go()

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, *, agreed: bool = False
    ) -> None:
        """The whole exchange, in the caller's thread (on CUDA: queued on the caller's stream).

        agreed: all ranks have compared their calls just now, so messages need no tags to keep them apart.
        """
        self._check_rows(source)
        self.guard.where.enter("an exchange")
        try:
            self.transport.exchange(plan, backward, output, source, agreed)
        finally:
            self.guard.where.go()

    def _check_rows(self, source: torch.Tensor) -> None:
        if source.device.type != self.device.type:
            raise Mismatch(
                f"rank {self.rank}: rows on {source.device}, but this yard's {self.world.backend} groups carry "
                f"{self.device.type} tensors; move the rows there",
                [self.ranks[self.rank]],
            )

    def next_site(self) -> int:
        """A number for a layer that is made now, from 1. Every rank makes the same layers in the same order."""
        self._sites += 1
        return self._sites

    def memory(
        self, model: torch.nn.Module, tokens: int, top_k: int, hidden: int, dtype: torch.dtype
    ) -> Memory:
        """What this yard takes beside the model's own, at most, with so many tokens a rank; it prints. Of the options as they are."""
        return memory_of(model, self.options, self.size, Call(tokens, top_k, hidden, dtype))

    def check_replicas(self, only: Held | None = None) -> int:
        """How many copies of experts, on all ranks, hold bit by bit what their homes would send now; Mismatch, naming the layer,
        the expert and the ranks, on every rank if one does not. Every rank calls this at the same point, at any point: replicas
        in use are those gathered since whose gradients have not been reduced. only: one layer's."""
        held = list(self.workspace.held.values()) if only is None else [only]
        return compare_copies(self.agreement, held, self.workspace.turn)

    # changes, by all ranks between the same two exchanges

    def choose(self, **changes: Any) -> None:
        """Plan with another scheduler, planner, slots, policy or model, or `checked`, from now on. Every rank calls this."""
        self.options = in_force(replace(self.options, **changes)).check_for(self.cluster)
        self.workspace.resident = self.options.resident
        self.workspace.chains.clear()  # another codec: whoever receives from now on gets an anchor
        self._plan_for(self.cluster)
        self.behind.close()
        self.behind = behind_of(self.options, self.transport, self.exchange, self._apart)

    def mark_dead(self, node: int, rail: int) -> None:
        """Plan around a dead nic from now on. Every rank of the yard calls this between the same two exchanges."""
        self.set_cluster(without(self.cluster, [(node, rail)]))

    def set_cluster(self, cluster: Cluster) -> None:
        """Plan for these rates and rails from now on; nodes and ranks stay as they are. Every rank calls this."""
        shape = (self.cluster.nodes, self.cluster.ranks_per_node, self.cluster.nics_per_node)
        if (cluster.nodes, cluster.ranks_per_node, cluster.nics_per_node) != shape:
            raise InvalidCluster(f"the yard's groups are for (nodes, ranks, nics) {shape}; make a new Yard")
        self.world = self.world.but({**self.world.families, self.ranks: cluster})
        self.channels.retarget(cluster)
        self.groups.retarget_behind(cluster)
        self._plan_for(cluster)

    # faults

    def whereabouts(self) -> dict[str, Any]:
        return self.guard.where.told()

    def settle(self) -> None:
        """Wait until every rank of the world is here, over the control network: before the optimizer steps, say, so that all
        notice a lost rail while the step can still be repeated."""
        self.floor("settle").meet()

    def self_check(self, most: int = 16) -> int:
        """Send random rows by the plans used last, each way, by the plan and by torch's own all-to-all, and compare every bit:
        how many exchanges were alike. Mismatch on every rank names the exchange, row and pair that differ. Every rank
        calls this between two steps."""
        plans = self.plans.latest(most) or [self.plan(some_traffic(self.size))]
        floor, deck = self.floor("self_check").meet(), self._deck()
        planned, plain = choose_transport(None, self.world.backend)(deck), Collective(deck)
        try:
            return floor.watched(lambda: compare_both_ways(plans, planned, plain, self.control, self.device))
        finally:
            planned.close()

    def recover(self, error: BaseException, *, seconds: float = 2.0) -> list[tuple[int, int]]:
        """After a lost rail: find the dead nics with all ranks, plan around them, make the groups anew.

        Every rank of the world calls this with the error that it got: RailLost, or a RuntimeError of torch from a
        collective outside the yard; any other error is raised again. Gives the (node, rail) that died, alike on all ranks of
        the group; raises RankLost if none did. What was under way is lost: repeat the step from its beginning.
        seconds: how long the ranks listen on their nics.
        """
        world = self.world
        if world.interfaces is None or not isinstance(error, (RailLost, RuntimeError)):
            raise error
        if self.guard.fault is None:
            self.guard.lost(str(error))
        if isinstance(self.guard.fault, RankLost):
            raise self.guard.fault
        self.generation += 1
        store = PrefixStore(f"recover/{self.generation}", self._store)
        me, patience = dist.get_rank(), 2 * world.timeout + 10  # others may still wait, each for its time-out
        meeting = Meeting(store, me, range(dist.get_world_size()), patience)
        dead = find_dead(meeting, me, world.ranks, world.families, world.interfaces, seconds)
        if not any(dead.values()):
            raise RankLost(
                f"{error}; every rail carries messages now: raise timeout= if the network is only slow"
            )
        self._shut()
        self.world = world.but({f: without(cluster, dead[f]) for f, cluster in world.families.items()})
        self._open()
        return dead[world.ranks]

    def close(self) -> None:
        """Finish what runs, saves too (not while an exception passes through: others may wait for rows that will not come, and this rank
        would wait for them), and destroy the groups that the yard made. Every rank calls this; twice is once."""
        if not self.closed:
            self._shut()

    def _shut(self) -> None:
        with ExitStack() as last:  # all of it, whatever one part raises
            for kept in (self.agreement, self.workspace):
                last.callback(kept.clear)
            for part in (self.groups, self.transport, self.forecasts, self.behind, self.guard):
                last.callback(part.close)
            if self.guard.fault is None and sys.exc_info()[0] is None:
                self.behind.close()  # others may have begun what this rank has yet to do its part of
                self.floors.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model exchanges over the same yard."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
