"""The ranks of a yard and how they reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster
from moeyard.runtime.agree.views import share_views
from moeyard.runtime.transport.detect import Place, detect_cluster, own_view

Where = dist.ProcessGroup | DeviceMesh | None
Family = tuple[int, ...]  # world ranks of one expert-parallel group, in its order


@dataclass(frozen=True, eq=False)
class World:
    """All that the groups of a yard follow from. Every rank of the world sees the same families and fellows.

    families: every expert-parallel group with its cluster, alike but for their rails. fellows: the ranks over which dense
    parameters are copies, several families each. interfaces: of the rails, where rails are bound. management: an
    interface that is no rail.
    """

    ranks: Family  # ours
    families: dict[Family, Cluster]
    fellows: list[Family]
    backend: str
    interfaces: tuple[str, ...] | None
    management: str | None
    timeout: float

    @property
    def cluster(self) -> Cluster:
        return self.families[self.ranks]

    @property
    def fellow(self) -> Family:
        """The ranks, this one among them, over which its dense parameters are copies."""
        return next(one for one in self.fellows if dist.get_rank() in one)

    @property
    def rank(self) -> int:
        """In the expert-parallel group."""
        return self.ranks.index(dist.get_rank())

    @property
    def railed(self) -> bool:
        """Rails are bound, so one that died can be told."""
        return self.interfaces is not None

    def but(self, families: dict[Family, Cluster]) -> World:
        return replace(self, families=families)


@dataclass(frozen=True)
class Wanted:
    """What a yard was asked for, and where in a lab it is."""

    where: Where
    cluster: Cluster | None
    interfaces: Sequence[str] | None
    management: str | None
    timeout: float
    place: Place | None


def see_world(store: Store, wanted: Wanted, digest: int) -> World:
    """Compare views with all ranks, by way of the store, and settle what was not given. digest: of options that must agree."""
    members, dense = members_of(wanted.where)
    given, place, backend = wanted.cluster, wanted.place, backend_of(wanted.where)
    if members != sorted(members):
        raise InvalidCluster(
            f"the mesh has expert-parallel ranks {members}, but a process group has its ranks in their order in the world: they "
            f"must ascend"
        )
    view = {"members": members, "dense": dense, "config": digest, **own_view()}
    view["rails"] = None if given is None else given.rails.tolist()
    views = share_views(store, dist.get_rank(), view, range(dist.get_world_size()), wanted.timeout)
    cluster = given or detect_cluster([views[r] for r in members], device_of(backend))
    if cluster.num_ranks != len(members):
        raise InvalidCluster(
            f"the expert-parallel group has {len(members)} ranks, the cluster {cluster.nodes} nodes x "
            f"{cluster.ranks_per_node} = {cluster.num_ranks}; give the cluster of one such group"
        )
    interfaces = wanted.interfaces
    if interfaces is None and place is not None and place.interfaces and backend == "gloo":
        fits = len(place.interfaces) == cluster.nics_per_node and cluster.nodes > 1
        interfaces = place.interfaces if fits else None
    own = tuple(members)
    return World(
        ranks=own,
        families={f: _cluster_of(f, own, cluster, views) for f in _distinct(views, "members")},
        fellows=_distinct(views, "dense"),
        backend=backend,
        interfaces=tuple(interfaces) if interfaces else None,
        management=wanted.management or (place.management if place and interfaces else None),
        timeout=wanted.timeout,
    )


def _cluster_of(family: Family, own: Family, cluster: Cluster, views: dict[int, dict[str, Any]]) -> Cluster:
    """Of any expert-parallel group: as ours, but for its rails."""
    rails = views[family[0]]["rails"]
    return cluster if rails is None or family == own else cluster.but(rails=rails)


def _distinct(views: dict[int, dict[str, Any]], key: str) -> list[Family]:
    return sorted({tuple(view[key]) for view in views.values()})


def members_of(where: Where) -> tuple[list[int], list[int]]:
    """(ranks of this expert-parallel group, ranks over which the dense parameters are copies)."""
    world = list(range(dist.get_world_size()))
    if not isinstance(where, DeviceMesh):
        return (world if where is None else list(dist.get_process_group_ranks(where))), world
    dense: list[int] = where.mesh.flatten().tolist()
    if where.ndim == 1:
        return list(dense), dense
    rows: list[list[int]] = (where.mesh if _expert_dimension(where) == 1 else where.mesh.T).tolist()
    return next(row for row in rows if dist.get_rank() in row), dense


def _expert_dimension(mesh: DeviceMesh) -> int:
    if mesh.ndim > 2:
        raise InvalidCluster(
            f"the mesh has {mesh.ndim} dimensions; slice out (data parallel, expert parallel) or one dimension"
        )
    names = mesh.mesh_dim_names or ()
    return names.index("ep") if "ep" in names else mesh.ndim - 1


def backend_of(where: Where) -> str:
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


def device_of(backend: str) -> torch.device:
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
