"""Rails that live and rails that are dead: what follows from a cluster, and from what the ranks heard. Nothing here looks at a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from moeyard.arrays import BoolArray
from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster


def common_rail(cluster: Cluster, rail: int) -> int | None:
    """The rail itself if it lives on every node, else the next one that does; None: no such rail."""
    for step in range(cluster.nics_per_node):
        other = (rail + step) % cluster.nics_per_node
        if (cluster.rails[:, other] > 0).all():
            return other
    return None


def dead_nics(cluster: Cluster, found: dict[int, dict[str, Any]]) -> list[tuple[int, int]]:
    """(node, rail) of the nics that died. found: what each rank of the cluster heard.

    On each rail, nics are taken out until all that are left hear each other: first one without carrier, then the one that
    hears and is heard by the fewest, the higher node where alike.
    """
    dead: list[tuple[int, int]] = []
    for rail in range(cluster.nics_per_node):
        alive = np.flatnonzero(cluster.rails[:, rail] > 0).tolist()
        if len(alive) < 2:
            continue
        speaks = {node: _speakers(cluster, node, rail) for node in alive}
        heard: dict[int, set[int]] = {
            node: {cluster.node(p) for r in speaks[node] for p in found[r]["heard"]} for node in alive
        }
        carrier = {node: any(found[r]["carrier"] for r in speaks[node]) for node in alive}
        left = set(alive)
        while len(left) > 1:
            links = {a: sum(b in heard[a] and a in heard[b] for b in left - {a}) for a in left}
            if min(links.values()) == len(left) - 1:
                break
            worst = min(left, key=lambda node: (carrier[node], links[node], -node))
            left.remove(worst)
            dead.append((worst, rail))
        # The last one is not to blame if it has a carrier: nobody was left to hear it.
        if len(left) == 1 and not carrier[next(iter(left))]:
            dead.append((left.pop(), rail))
    return sorted(dead)


def _speakers(cluster: Cluster, node: int, rail: int) -> list[int]:
    per = cluster.ranks_per_node
    return [node * per + local for local in range(per) if cluster.nic_G[local] == rail]


def still_alive(cluster: Cluster) -> BoolArray:
    """[node, node]: does some rail live at both ends?"""
    live = cluster.rails > 0
    return np.asarray((live[:, None, :] & live[None, :, :]).any(axis=2))


def without(cluster: Cluster, nics: Iterable[tuple[int, int]]) -> Cluster:
    """The cluster with these nics dead."""
    rails = cluster.rails.copy()
    for node, rail in nics:
        if not (0 <= node < cluster.nodes and 0 <= rail < cluster.nics_per_node):
            raise InvalidCluster(
                f"no nic {rail} on node {node}: nodes are 0..{cluster.nodes - 1}, rails 0..{cluster.nics_per_node - 1}"
            )
        rails[node, rail] = 0.0
    return cluster.but(rails=rails)


def own_nic(
    cluster: Cluster, ranks: Sequence[int], rank: int, interfaces: Sequence[str]
) -> tuple[list[int], str | None]:
    """(world ranks on other nodes whose nic is on our rail, our interface or None if it is dead)."""
    node, rail = cluster.nic(rank)
    peers = [ranks[r] for r in range(len(ranks)) if cluster.nic(r)[1] == rail and cluster.node(r) != node]
    return peers, interfaces[rail] if cluster.rails[node, rail] > 0 else None


def dead_in_group(
    family: tuple[int, ...], cluster: Cluster, found: dict[int, dict[str, Any]]
) -> list[tuple[int, int]]:
    """The dead nics of one expert-parallel group, from what all ranks of the world heard."""
    place = {r: i for i, r in enumerate(family)}
    own = {
        place[r]: {
            "carrier": found[r]["carrier"],
            "heard": [place[p] for p in found[r]["heard"] if p in place],
        }
        for r in family
    }
    return dead_nics(cluster, own)
