"""Runs one case in SimGrid. For the system's Python with Debian's python3-simgrid; reads and writes JSON.

in   {"hosts": n, "capacity": [bytes/s per link], "latency": seconds, "flows": [[src, dst, bytes, [links]], ...],
      "optim": "Full" or "Lazy"}
out  {"makespan": s, "end": [s per flow], "wall" and "cpu": seconds of the simulation alone, "version": ...}

CM02 with cross-traffic off and the TCP window unlimited is plain max-min sharing, but for weights of 1/latency:
every path here has the same latency, carried by its first link, so that they are equal. "Full" solves the whole
network at every event; "Lazy", SimGrid's default, only what it believes has changed.
"""

import json
import sys
import time

OPTIONS = ["network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:1e20", "network/weight-S:0"]


def main():
    import simgrid
    from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone

    job = json.load(sys.stdin)
    options = [*OPTIONS, f"network/optim:{job['optim']}"]
    engine = Engine(["simgrid", "--log=root.thresh:error", *(f"--cfg={option}" for option in options)])
    zone = NetZone.create_full_zone("zone")
    hosts = [zone.create_host(f"h{i}", 1e9) for i in range(job["hosts"])]
    first = {path[0] for _, _, _, path in job["flows"]}
    links = []
    for i, capacity in enumerate(job["capacity"]):
        link = zone.create_link(f"l{i}", capacity)
        link.set_latency(job["latency"] if i in first else 0.0)
        links.append(link.seal())
    routed = {}
    for src, dst, _, path in job["flows"]:
        if routed.setdefault((src, dst), path) != path:
            raise SystemExit(f"two paths from host {src} to host {dst}")
    for (src, dst), path in routed.items():
        route = [LinkInRoute(links[k]) for k in path]
        zone.add_route(hosts[src].netpoint, hosts[dst].netpoint, None, None, route, False)
    zone.seal()
    end = []

    def run():
        comms = [Comm.sendto_async(hosts[src], hosts[dst], int(size)) for src, dst, size, _ in job["flows"]]
        Comm.wait_all(comms)
        end.extend(comm.finish_time for comm in comms)

    Actor.create("all", Host.by_name("h0"), run)
    wall, cpu = time.perf_counter(), time.process_time()
    engine.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    version = str(simgrid.simgrid_version) if hasattr(simgrid, "simgrid_version") else ""
    print(json.dumps({"makespan": engine.clock, "end": end, "wall": wall, "cpu": cpu, "version": version}))


if __name__ == "__main__":
    main()
