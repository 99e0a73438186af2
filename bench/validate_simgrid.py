"""Our simulator beside SimGrid's: makespans over many cases, and speed at ten thousand flows.

    python bench/validate_simgrid.py [--out bench/results/simgrid.json] [--speed] [--python /usr/bin/python3]

Needs Debian's python3-simgrid (apt-get install python3-simgrid), which runs under the system's own Python: a worker is
started there for each case and speaks JSON. Both simulate the same messages over the same links: whole blocks, all
at once. The verdict is against SimGrid's full solution; its default, "lazy" one stands beside it. Where the two differ
the lazy one moves more bytes over some link than the link can carry (`lazy_overrun` says how many times its capacity).
Exit status 1 if any makespan differs from the full solution by more than 1%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import moeyard as my
from moeyard.links import Links
from moeyard.sim import run
from moeyard.sim.flow import message_operations

HERE = Path(__file__).parent
LATENCY = 1e-5
LIMIT = 0.01


def flat(hosts):
    port = my.Port(1.25e9, LATENCY)
    return my.Cluster(hosts, 1, port, port)


def tiered(nodes, ranks, **more):
    return my.Cluster(nodes, ranks, my.Port(10e9, LATENCY), my.Port(1.25e9, LATENCY), **more)


def incast(hosts, seed=0):
    rows = np.zeros((hosts, hosts), int)
    rows[1:, 0] = np.random.default_rng(seed).integers(50, 1000, hosts - 1)
    return my.Traffic(rows, 4096)


def cases():
    """(name, cluster, traffic): at least 30, 4 to 64 hosts, one latency in each."""
    for hosts in (4, 8, 16, 32, 64):
        yield f"incast {hosts}", flat(hosts), incast(hosts)
    for hosts in (4, 8, 16, 32):
        for kind in ("balanced", "random", "zipf:0.9", "zipf:1.2", "sparse:0.1", "hot:0.25"):
            yield f"{kind} {hosts}", flat(hosts), my.workload(kind, hosts, mb=8, row_bytes=4096, seed=hosts)
    for kind in ("balanced", "zipf:0.9", "sparse:0.1"):
        yield f"{kind} 64", flat(64), my.workload(kind, 64, mb=8, row_bytes=4096, seed=64)
    for nodes, ranks in ((2, 2), (4, 4), (4, 8), (8, 4)):
        for kind in ("balanced", "zipf:0.9", "sparse:0.1"):
            cluster = tiered(nodes, ranks)
            yield (
                f"two-tier {nodes}x{ranks} {kind}",
                cluster,
                my.workload(kind, nodes * ranks, mb=8, row_bytes=4096),
            )
    for nics in (1, 2):
        cluster = tiered(4, 4, nics_per_node=nics)
        yield f"shared nics 4x4/{nics} zipf:0.9", cluster, my.workload("zipf:0.9", 16, mb=8, row_bytes=4096)
    rails = np.ones((4, 4))
    rails[1, 2], rails[3, 0] = 0.5, 0.25
    yield (
        "uneven rails 4x4 zipf:0.9",
        tiered(4, 4, rails=rails),
        my.workload("zipf:0.9", 16, mb=8, row_bytes=4096),
    )
    for dcs, nodes, ranks in ((2, 4, 2), (2, 4, 4), (4, 8, 2), (4, 16, 4)):
        for kind in ("balanced", "zipf:0.9"):
            cluster = tiered(nodes, ranks, datacenters=dcs, wan=my.Port(2.5e9, LATENCY))
            traffic = my.workload(kind, nodes * ranks, mb=8, row_bytes=4096, seed=dcs)
            yield f"wan {dcs} dc {nodes}x{ranks} {kind}", cluster, traffic


def as_job(cluster, schedule):
    """The same messages for SimGrid."""
    links, messages = Links(cluster), schedule.messages()
    ptr, path, _ = links.paths(np.ascontiguousarray(messages.src), np.ascontiguousarray(messages.dst))
    flows = [
        [int(m.src), int(m.dst), int(m.rows) * schedule.traffic.row_bytes, path[ptr[i] : ptr[i + 1]].tolist()]
        for i, m in enumerate(messages)
    ]
    return {
        "hosts": cluster.num_ranks,
        "capacity": links.capacity_L.tolist(),
        "latency": LATENCY,
        "flows": flows,
    }


def simgrid(python, job, optim, limit=900):
    """What SimGrid says of a job. A missing package is an error that says so."""
    try:
        done = subprocess.run(
            [python, str(HERE / "simgrid_worker.py")], input=json.dumps(job | {"optim": optim}), capture_output=True, text=True,
            timeout=limit, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        sys.exit(f"no {python}; name the system's Python with --python")
    if done.returncode:
        sys.exit(
            f"SimGrid failed under {python} (is Debian's python3-simgrid installed?): {done.stderr.strip().splitlines()[-1]}"
        )
    return json.loads(done.stdout[done.stdout.index("{") :])


def overrun(job, ends):
    """The most bytes that had crossed a link by some time, over what it can carry until then."""
    worst = 0.0
    for link, capacity in enumerate(job["capacity"]):
        crossing = sorted(
            (end, size) for (_, _, size, path), end in zip(job["flows"], ends, strict=True) if link in path
        )
        sent = 0
        for end, size in crossing:
            sent += size
            worst = max(worst, sent / capacity / (end - job["latency"]))
    return worst


def compare(python):
    rows = []
    for name, cluster, traffic in cases():
        schedule = my.schedule(cluster, traffic, "direct")
        job = as_job(cluster, schedule)
        full, lazy = simgrid(python, job, "Full"), simgrid(python, job, "Lazy")
        timeline = my.simulate(cluster, schedule)
        ends = np.array(full["end"])
        rows.append(
            {
                "case": name,
                "ranks": cluster.num_ranks,
                "messages": len(ends),
                "simgrid_s": full["makespan"],
                "moeyard_s": timeline.makespan,
                "difference": timeline.makespan / full["makespan"] - 1,
                "worst_message": float(np.abs(timeline.end_M / ends - 1).max()),
                "lazy_difference": timeline.makespan / lazy["makespan"] - 1,
                "lazy_overrun": overrun(job, lazy["end"]),
                "overrun": overrun(job, timeline.end_M.tolist()),
            }
        )
        print(
            "{case:28} {messages:5} messages: SimGrid {simgrid_s:.6f} s, ours {moeyard_s:.6f} s, {difference:+.1e}, "
            "worst message {worst_message:.1e}; lazy {lazy_difference:+.1e}, overrun {lazy_overrun:.3f}".format(
                **rows[-1]
            )
        )
    return rows, full["version"]


def speed(python, hosts=101, repeats=3):
    """Processor seconds of the simulation alone, ten thousand flows at once: alike, and no two alike. Merging is off."""
    cluster = flat(hosts)
    rng = np.random.default_rng(0)
    out = []
    for name, rows, times in (
        ("alike", np.full((hosts, hosts), 200), repeats),
        ("no two alike", 200 + rng.permutation(hosts * hosts).reshape(hosts, hosts), 1),
    ):
        schedule = my.schedule(cluster, my.Traffic(rows, 4096), "direct")
        links, job = Links(cluster), as_job(cluster, schedule)
        operations = message_operations(links, schedule)
        run(operations, links.capacity_L, merge=False)  # compiled
        cpu, wall = {"theirs": [], "ours": []}, {"theirs": [], "ours": []}
        for _ in range(times):
            theirs = simgrid(python, job, "Lazy")  # the faster of the two
            cpu["theirs"].append(theirs["cpu"])
            wall["theirs"].append(theirs["wall"])
            for _ in range(3):
                began = time.perf_counter(), time.process_time()
                course = run(operations, links.capacity_L, merge=False)
                wall["ours"].append(time.perf_counter() - began[0])
                cpu["ours"].append(time.process_time() - began[1])
        a, b = statistics.median(cpu["theirs"]), statistics.median(cpu["ours"])
        out.append(
            {
                "flows": len(operations),
                "sizes": name,
                "simgrid_cpu_s": a,
                "moeyard_cpu_s": b,
                "simgrid_wall_s": statistics.median(wall["theirs"]),
                "moeyard_wall_s": statistics.median(wall["ours"]),
                "times_faster": a / b,
                "difference": float(course.end.max()) / theirs["makespan"] - 1,
            }
        )
        print(
            "{flows} flows, {sizes}: SimGrid {simgrid_cpu_s:.2f} s, ours {moeyard_cpu_s:.3f} s of processor, "
            "{times_faster:.0f} times faster".format(**out[-1]),
            flush=True,
        )
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "simgrid.json")
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument(
        "--speed", action="store_true", help="also compare speed at ten thousand flows (a minute or two)"
    )
    options = parser.parse_args()
    rows, version = compare(options.python)
    worst = max(abs(row["difference"]) for row in rows)
    result = {
        "simgrid": version,
        "model": "CM02, cross-traffic off, TCP window unlimited",
        "worst": worst,
        "cases": rows,
    }
    if options.speed:
        result["speed"] = speed(options.python)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(rows)} cases, worst difference {worst:.1e}; written to {options.out}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
