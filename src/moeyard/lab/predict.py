"""What a lab should take: the plan simulated on a cluster without a spine; of gloo's own all-to-all, messages on the rails it chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.links import NIC_IN, NIC_OUT, Links
from moeyard.schedule import Schedule
from moeyard.schedulers import schedule
from moeyard.sim.flow import message_operations, run
from moeyard.sim.operations import Operations
from moeyard.traffic import Traffic


def predict(cluster: Cluster, plan: Schedule) -> float:
    """Seconds of a planned exchange on rails without a spine."""
    links = Links(cluster.but(spine=False))
    return _seconds(links, message_operations(links, plan))


def predict_gloo(cluster: Cluster, traffic: Traffic) -> float:
    """Seconds of gloo's own all-to-all: every block at once, between ranks a and b on the lower of their two rails.

    The higher address connects to the lower, and packets leave by the rail of the address connected to.
    """
    links = Links(cluster)
    plan = schedule(cluster.but(rails=None), traffic, "direct")
    messages = plan.messages()
    operations = message_operations(links, plan, messages)
    src, dst = (np.ascontiguousarray(messages[end]) for end in ("src", "dst"))
    nic_R = np.array([cluster.nic(r)[1] for r in range(cluster.num_ranks)])
    return _seconds(links, _on_rails(links, operations, src, dst, np.minimum(nic_R[src], nic_R[dst])))


def _seconds(links: Links, operations: Operations) -> float:
    course = run(
        operations, links.capacity_L, contended_L=links.contended_L, contention=links.cluster.contention
    )
    return float(course.end.max(initial=0.0))


def _on_rails(
    links: Links, operations: Operations, src: IntArray, dst: IntArray, rail: IntArray
) -> Operations:
    """The same operations with the messages between nodes on these rails."""
    c, path = links.cluster, operations.path.copy()
    ptr = operations.path_ptr
    k, f = src // c.ranks_per_node, dst // c.ranks_per_node
    across = np.flatnonzero(k != f)
    path[ptr[across]] = links.first[NIC_OUT] + k[across] * c.nics_per_node + rail[across]
    path[ptr[across + 1] - 1] = links.first[NIC_IN] + f[across] * c.nics_per_node + rail[across]
    return replace(operations, path=path)
