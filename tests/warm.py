"""Call every planner and scheduler once, before many ranks and workers each do it: what `moeyard warm` has not compiled is compiled.

python -m tests.warm
"""

from __future__ import annotations

import numpy as np

import moeyard as my
from moeyard.kernels.codec.bits import decode_bits, encode_bits
from moeyard.kernels.codec.blocks import checksum
from moeyard.kernels.codec.changes import decode_changes, encode_changes
from moeyard.kernels.codec.pick import decode_pick, encode_pick
from moeyard.warm import warm_crossing, warm_placements, warm_schedules
from moeyard.workloads import workload


def schedules() -> None:
    """Every scheduler on whole and on uneven rails and across datacenters; verified and costed."""
    up, out, law = my.Port(2e9, 1e-5), my.Port(1e9, 1e-5), my.Contention(0.1, 1, 2.0)
    apart = my.Cluster(4, 2, up, out, contention=law, datacenters=2, wan=my.Port(1e9, 1e-4))
    for rails in (None, [[1, 0.5], [0, 1], [1, 1]], apart):
        cluster = rails if rails is apart else my.Cluster(3, 2, up, out, rails=rails, contention=law)
        warm_schedules(cluster, my.SCHEDULERS)
        for name in my.SCHEDULERS:
            made = my.schedule(cluster, workload("zipf:0.9", cluster.num_ranks, mb=1), name)
            for one in (made, made.reversed()):
                my.verify(one), my.estimate(cluster, one)


def placements() -> None:
    """Every planner, its assignment, the bound, the simulator."""
    cluster = my.Cluster(2, 2, my.Port(2e9, 1e-5), my.Port(1e9, 1e-5))
    traffic = warm_placements(cluster, [{"planner": name, "slots": 1} for name in my.PLANNERS])
    my.place(cluster, [my.Demand([[4, 2, 1, 1]] * 4)], "quota", 2)
    my.bound(cluster, traffic)
    warm_crossing(cluster)
    my.simulate(cluster, my.schedule(cluster, traffic, "direct"))


def codecs() -> None:
    """Every codec's kernels, once."""
    master, words = np.ones(40, np.float32), np.zeros(400, np.uint32)
    for code, read, number in ((encode_bits, decode_bits, 2), (encode_pick, decode_pick, 8)):
        code(master, master * 0, words, words.view(np.uint16), np.int64(4), np.int64(number))
        read(master, words, words.view(np.uint16), np.int64(4), np.int64(number))
    counts, bits, pairs = np.zeros(16, np.uint8), np.arange(1024, dtype=np.uint16), np.zeros(256, np.uint64)
    encode_changes(bits, bits, counts, pairs)
    decode_changes(bits, counts, pairs)
    checksum(words)


if __name__ == "__main__":
    schedules()
    placements()
    codecs()
