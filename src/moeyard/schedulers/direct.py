"""Whole blocks at once: what a plain all-to-all does, and what hashing to rails does."""

from __future__ import annotations

from moeyard.cluster import Cluster
from moeyard.forms.blocks import Blocks
from moeyard.schedule import Schedule
from moeyard.traffic import Traffic


def schedule_direct(cluster: Cluster, traffic: Traffic) -> Schedule:
    """Every block straight from origin to target, all at once: no balancing, incast and all. Around a dead nic a block
    goes by way of a neighbour."""
    return Schedule(cluster, traffic, Blocks(cluster, traffic, hashed=False), "direct")


def schedule_ecmp(cluster: Cluster, traffic: Traffic) -> Schedule:
    """Every block on one rail drawn by hashing its rank pair, all at once: conventional load balancing."""
    return Schedule(cluster, traffic, Blocks(cluster, traffic, hashed=True), "ecmp")
