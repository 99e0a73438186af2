"""Placement: the EPLB drop-in, planners on recorded routing, Pro-Prophet's model, the joint search.

    python bench/placement.py [eplb] [traces] [forecast] [prophet] [auto] [speed] [singles] [--records N] [--out FILE.json]

`singles`: `auto` against every other planner on random jobs up to 128 ranks x 256 experts, by predicted step time, and the
processor time that it takes against all of them together (`--jobs`, `--seed`).

Prints every figure with its target and writes them as JSON. smartmoe-32 is read from ../shared/traces where it is there
and left out, with a line that says so, where it is not. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

import moeyard as my
from moeyard.eplb import balancedness_of, rebalance_experts
from moeyard.forecast import score_forecasts
from moeyard.formats.traces import find_trace
from moeyard.kernels.place.greedy import greedy_hosts
from moeyard.model import STAND_IN
from moeyard.planners.compare import POLICIES
from moeyard.planners.prophet import BALANCED, model_times
from moeyard.planners.quota import plan_quota
from moeyard.planners.static import static_homes
from moeyard.sim.step import simulate_step

ROOT = Path(__file__).resolve().parent.parent
SMARTMOE = ROOT.parent / "shared" / "traces" / "smartmoe-32.npz"
SKEWS = (0.5, 0.8, 1.0, 1.2)
# EPLB as published, one thread of an Arm Neoverse-N1: seconds, balancedness by skew.
PUBLISHED = {
    "8 groups": (1.36, {0.8: 0.861, 1.0: 0.713, 1.2: 0.512}),
    "no groups": (6.3, {0.8: 0.997, 1.0: 0.978, 1.2: 0.907}),
}
missed = []


def check(what, value, target, least=True):
    good = value >= target if least else value <= target
    if not good:
        missed.append(f"{what}: {value:.4g}, target {'>=' if least else '<='} {target:g}")
    return "ok" if good else "MISSED"


def traces():
    """(name, trace, cluster) of every trace that is there."""
    found = [
        ("olmoe-64", find_trace("olmoe-64"), "h200-4x8"),
        ("mixtral-8", find_trace("mixtral-8"), "h200-4x8"),
    ]
    if SMARTMOE.exists():
        return [("smartmoe-32", my.load_trace(SMARTMOE), "h200-2x8"), *found]
    print("smartmoe-32 is not beside the repository (../shared/traces): left out")
    return found


def zipf(layers, experts, skew):
    rng = np.random.default_rng(0)
    share = np.arange(1, experts + 1.0) ** -skew
    return np.stack([rng.multinomial(10**6, rng.permutation(share / share.sum())) for _ in range(layers)])


def quickest(call, repeats=9):
    """(median wall seconds, median processor seconds), after one call to warm up."""
    call()
    wall, cpu = [], []
    for _ in range(repeats):
        a, b = time.perf_counter(), time.thread_time()
        call()
        wall.append(time.perf_counter() - a)
        cpu.append(time.thread_time() - b)
    return float(np.median(wall)), float(np.median(cpu))


def bench_eplb():
    results = []
    for name, layers, replicas, groups, nodes, gpus in (
        ("8 groups", 58, 288, 8, 4, 32),
        ("no groups", 61, 320, 1, 1, 64),
        ("58 layers, no groups", 58, 288, 1, 1, 32),
    ):
        print(
            f"\nEPLB's job: {layers} layers, 256 -> {replicas} replicas, {groups} groups, {nodes} nodes, {gpus} gpus"
        )
        for skew in SKEWS:
            weight = zipf(layers, 256, skew)
            phys, _, _ = rebalance_experts(weight, replicas, groups, nodes, gpus)
            twice = sum(len(set(g)) < len(g) for one in phys for g in one.reshape(gpus, -1).tolist())
            got = float(balancedness_of(weight, phys, gpus).mean())
            ceiling = 1.0
            if groups == 8:  # two groups a node: heaviest with lightest is the best pairing
                sums = np.sort(weight.reshape(layers, 8, -1).sum(axis=2), axis=1)
                ceiling = float((weight.sum(axis=1) / 4 / (sums + sums[:, ::-1]).max(axis=1)).mean())
            wall, cpu = quickest(lambda: rebalance_experts(weight, replicas, groups, nodes, gpus))  # noqa: B023
            seconds, theirs = PUBLISHED.get(name, (None, {}))
            line = {
                "setting": name,
                "skew": skew,
                "balancedness": got,
                "ceiling": ceiling,
                "published": theirs.get(skew),
                "gpus_with_two_copies": twice,
                "wall_s": wall,
                "cpu_s": cpu,
                "times_faster": seconds / cpu if seconds else None,
            }
            results.append(line)
            says = [check(f"eplb {name} s={skew} two copies", twice, 0, least=False)]
            if seconds:
                says.append(check(f"eplb {name} s={skew} times faster", seconds / cpu, 100))
            if groups == 8:
                says.append(check(f"eplb {name} s={skew} of the ceiling", got / ceiling, 0.97))
            elif skew <= 1.0:
                says.append(check(f"eplb {name} s={skew}", got, 0.97))
            if skew in theirs:
                says.append(check(f"eplb {name} s={skew} against the published", got, theirs[skew]))
            print(
                f"  s={skew}: balancedness {got:.4f} (ceiling {ceiling:.3f}, published {theirs.get(skew, '-')}), "
                f"two copies on a gpu: {twice}, {wall * 1e3:.1f} ms wall, {cpu * 1e3:.1f} ms processor"
                + (f", {seconds / cpu:.0f} x the published code" if seconds else "")
                + f"  [{' '.join(says)}]"
            )
    return results


def balance(cluster, demand, placement, policy):
    return my.assign(cluster, demand, placement, policy).balancedness(cluster.speed)


def bench_traces(records):
    results = {}
    for name, trace, where in traces():
        cluster = my.Cluster.load(where)
        print(
            f"\n{name} on {where}: balancedness / copies, mean over records, 2 slots per rank, exact counts"
        )
        if name == "smartmoe-32":
            fresh, stale, copies = [], [], []
            for r in range(1, trace.num_records):
                for layer in range(trace.num_layers):
                    now, before = trace.demand(r, layer), trace.demand(r - 1, layer)
                    placement = my.place(cluster, now, "quota", slots=2)
                    fresh.append(balance(cluster, now, placement, "quota"))
                    copies.append(placement.copies)
                    stale.append(balance(cluster, now, my.place(cluster, before, "quota", slots=2), "quota"))
            age = int(np.median(np.diff(trace.steps)))
            print(
                f"  quota: {np.mean(fresh):.4f} with {np.mean(copies):.1f} copies (most {max(copies)}) "
                f"[{check('smartmoe balancedness', np.mean(fresh), 0.98)} "
                f"{check('smartmoe copies', max(copies), 16, least=False)}]"
            )
            print(
                f"  planned on counts {age} iterations old (the trace keeps no younger), split now: {np.mean(stale):.4f} "
                f"[{check('smartmoe stale balancedness', np.mean(stale), 0.94)}]"
            )
            results["smartmoe-32 quota"] = {
                "balancedness": float(np.mean(fresh)),
                "copies": float(np.mean(copies)),
                "most_copies": int(max(copies)),
                "stale": float(np.mean(stale)),
                "age": age,
            }
        names = ("static", "shadow", "prophet", "balanced", "quota")
        chosen = np.linspace(1, trace.num_records - 1, records).astype(int)
        print("  layer  " + "".join(f"{n:>16}" for n in names) + "   quota >= others at their copies")
        for layer in range(trace.num_layers):
            figures = {n: [] for n in names}
            holds = True
            for r in chosen:
                demand = trace.demand(int(r), layer)
                for n in names:
                    placement = my.place(cluster, demand, n, slots=2)
                    got = balance(cluster, demand, placement, POLICIES[n])
                    figures[n].append((got, placement.copies))
                    if n not in ("static", "quota"):
                        ours = plan_quota(cluster, demand, slots=2, copies=placement.copies)
                        holds &= balance(cluster, demand, ours, "quota") >= got - 1e-12
            means = {n: np.mean(figures[n], axis=0) for n in names}
            check(f"{name} layer {layer}: quota at no more copies", float(holds), 1)
            results[f"{name} layer {layer}"] = {n: [float(x) for x in means[n]] for n in names} | {
                "holds": bool(holds)
            }
            print(
                f"  {layer:5d}  "
                + "".join(f"{means[n][0]:9.3f} /{means[n][1]:5.1f}" for n in names)
                + f"   {holds}"
            )
    return results


def bench_forecast():
    results = {}
    for name, trace, where in traces():
        cluster = my.Cluster.load(where)
        layers = range(0, trace.num_layers, max(1, trace.num_layers // 4))
        first = 16 if name != "smartmoe-32" else 40
        history = [[trace.demand(r, layer) for r in range(max(0, first - 12), first)] for layer in layers]
        print(
            f"\nforecasts on {name}, records {max(0, first - 12)}..{first - 1}, planned by quota with 2 slots"
        )
        for score in score_forecasts(cluster, history, slots=2):
            print(
                f"  {score.method:6s} error {score.error:.3f}, step time x {score.slowdown:.3f}, "
                f"balancedness {score.balancedness:.3f} ({score.guesses} guesses)"
            )
            results[f"{name} {score.method}"] = [score.error, score.slowdown, score.balancedness]
    return results


def bench_prophet():
    model = STAND_IN.but(layers=8, non_moe_forward=2e-3, non_moe_backward=4e-3)
    one_node = my.Cluster(
        1, 16, scale_up=my.Port(48.85e9, 1e-5), scale_out=my.Port(1e9, 0), name="one tier, 16 ranks"
    )
    rng = np.random.default_rng(0)
    results = {"model": [], "rb": {}}
    print("\nPro-Prophet's performance model against the simulated step, 8 layers (paper: within 5%)")
    for cluster in (one_node, my.Cluster.load("h200-2x8"), my.Cluster.load("h200-4x8")):
        ranks, experts = cluster.num_ranks, 2 * cluster.num_ranks
        for skew in (0.0, 0.5, 1.0, 1.5):
            share = np.arange(1, experts + 1.0) ** -skew
            share = rng.permutation(share / share.sum())
            demand = my.Demand(rng.multinomial(16384, share, ranks))
            homes = static_homes(experts, ranks)
            times = model_times(cluster, model, overlap=True)
            tolerance = BALANCED * demand.rows.sum() / experts
            hosts, predicted = greedy_hosts(
                demand.rows, homes, cluster.speed.copy(), 0, tolerance, experts, times, True
            )
            placement = my.Placement(homes, hosts, "prophet")
            predicted += model.non_moe_forward + model.non_moe_backward
            served = my.assign(cluster, demand, placement, "own")
            simulated = simulate_step(cluster, model, placement, served).makespan / model.layers
            error = predicted / simulated - 1
            results["model"].append([cluster.name, skew, placement.copies, predicted, simulated, error])
            print(
                f"  {cluster.name:20s} Zipf {skew}: {placement.copies:4d} copies, model {predicted * 1e3:.2f} ms, "
                f"simulated {simulated * 1e3:.2f} ms, {error:+.1%}{'' if abs(error) <= 0.05 else '  beyond 5%'}"
            )
    for name, trace, where in traces():
        cluster = my.Cluster.load(where)
        ratios = []
        for layer in range(trace.num_layers):
            demand = trace.demand(trace.num_records // 2, layer)
            spread = {}
            for n in ("static", "shadow", "prophet"):
                placement = my.place(cluster, demand, n)
                spread[n] = float(my.assign(cluster, demand, placement, POLICIES[n]).rows_R.std())
            ratios.append((spread["static"] / spread["prophet"], spread["shadow"] / spread["prophet"]))
        results["rb"][name] = ratios
        print(f"RB (std before / after) on {name}, per layer, prophet, and over shadow's:")
        print("  " + "  ".join(f"{a:.2f} ({b:.2f} x)" for a, b in ratios))
    return results


def places(cluster):
    """The cluster, with 100 Gbit/s nics, and cut into two datacenters."""
    slow = my.Port(12.5e9, cluster.scale_out.latency)
    yield cluster.name, cluster
    yield "100 Gbit/s", cluster.but(scale_out=slow)
    yield "two datacenters", cluster.but(datacenters=2, wan=my.Port(100e9, 1e-3))


def bench_auto(records):
    results = {}
    worst, ratios = 0.0, []
    others = [n for n in my.PLANNERS if n != "auto"]
    print("\nauto against the best single planner, whole steps (all layers) by the step simulation")
    for name, trace, where in traces():
        model = STAND_IN.but(layers=trace.num_layers)
        for title, cluster in places(my.Cluster.load(where)):
            for r in np.linspace(1, trace.num_records - 1, records).astype(int):
                seconds = {}
                for n in my.PLANNERS:
                    placements, served = [], []
                    for layer in range(trace.num_layers):
                        demand = trace.demand(int(r), layer)
                        placements.append(my.place(cluster, demand, n, model=model))
                        served.append(my.assign(cluster, demand, placements[-1], POLICIES[n], model=model))
                    seconds[n] = simulate_step(cluster, model, placements, served).makespan
                best = min(others, key=seconds.get)
                ratio = seconds["auto"] / seconds[best]
                worst = max(worst, ratio)
                ratios.append(ratio)
                results[f"{name} {title} record {r}"] = seconds
                print(
                    f"  {name} on {title}, record {r}: auto {seconds['auto'] * 1e3:.1f} ms, best other {best} "
                    f"{seconds[best] * 1e3:.1f} ms, ratio {ratio:.3f}; static {seconds['static'] * 1e3:.1f} ms",
                    flush=True,
                )
    print(
        f"worst ratio {worst:.3f} [{check('auto worst ratio', worst, 1.02, least=False)}], "
        f"mean {np.mean(ratios):.3f} [{check('auto mean ratio', np.mean(ratios), 1.0, least=False)}]"
    )
    return results


def bench_speed():
    results = {}
    rng = np.random.default_rng(0)
    print("\nauto's planning time, one layer, 64 ranks x 256 experts, warm, one thread")
    for title, cluster in places(
        my.Cluster.load("h200-4x8").but(nodes=8, rails=None, speed=None, name="h200-8x8")
    ):
        for skew in (0.5, 1.0):
            share = np.arange(1, 257.0) ** -skew
            demand = my.Demand(rng.multinomial(16384, rng.permutation(share / share.sum()), 64))
            wall, cpu = quickest(lambda: my.place(cluster, demand, "auto"), 25)  # noqa: B023
            results[f"{title} Zipf {skew}"] = [wall, cpu]
            says = check(f"auto planning time {title} Zipf {skew}", cpu, 5e-3, least=False)
            print(f"  {title}, Zipf {skew}: {wall * 1e3:.2f} ms wall, {cpu * 1e3:.2f} ms processor [{says}]")
    return results


def random_jobs(seed, count):
    """(title, cluster, model, demand): 4 to 128 ranks, 8 to 256 experts, one or two datacenters."""
    rng = np.random.default_rng(seed)
    while count:
        nodes, per_node = int(rng.choice([1, 2, 4, 8, 16])), int(rng.choice([2, 4, 8]))
        experts, centers = int(rng.choice([8, 32, 64, 128, 256])), int(rng.choice([1, 1, 2]))
        ranks = nodes * per_node
        if nodes % centers or ranks < 4:
            continue
        count -= 1
        wan = my.Port(float(rng.choice([1e9, 5e9])), 5e-3) if centers > 1 else None
        cluster = my.Cluster(
            nodes, per_node, my.Port(380e9, 2e-6), my.Port(48.85e9, 1e-5), datacenters=centers, wan=wan
        )
        weights = int(rng.choice([1024, 4096])) * int(rng.choice([512, 4096]))
        model = STAND_IN.but(
            expert_bytes=6 * weights,
            expert_flops=6.0 * weights,
            layers=8,
            non_moe_forward=1e-3,
            non_moe_backward=2e-3,
        )
        share = rng.permutation(1 / np.arange(1, experts + 1) ** rng.uniform(0, 1.2))
        rows = rng.choice([2048, 16384], ranks)
        demand = my.Demand(np.stack([rng.multinomial(n, share / share.sum()) for n in rows]))
        yield f"{nodes}x{per_node} ranks, {experts} experts, {centers} datacenters", cluster, model, demand


def timed(cluster, model, demand, planner):
    """(predicted seconds, processor seconds of the placement, and of the way to serve it with its figure), the better of two."""
    placing, serving = [], []
    for _ in range(2):
        start = time.thread_time()
        placement = my.place(cluster, demand, planner, model=model)
        placed = time.thread_time()
        served = my.assign(cluster, demand, placement, "auto", model=model)
        seconds = my.step_cost(cluster, model, placement, served).total
        placing.append(placed - start)
        serving.append(time.thread_time() - placed)
    return seconds, min(placing), min(serving)


def bench_singles(jobs, seed):
    """`auto` never above a planner, and its time against that of all of them."""
    worst, lines = 0.0, []
    for title, cluster, model, demand in random_jobs(seed, jobs):
        found = {name: timed(cluster, model, demand, name) for name in my.PLANNERS}
        auto = found.pop("auto")
        ratio = auto[0] / min(one[0] for one in found.values())
        worst = max(worst, ratio)
        singles = [sum(one[k] for one in found.values()) for k in (1, 2)]
        lines.append([title, ratio, auto[1], auto[2], *singles])
    times = np.array([line[2:] for line in lines])
    placing = times[:, 0].sum() / times[:, 2].sum()
    whole = times[:, :2].sum() / times[:, 2:].sum()
    large = np.array(["16x8" in line[0] or "8x8" in line[0] for line in lines])
    print(f"\nauto against every planner on {jobs} random jobs (seed {seed}), by predicted step time")
    print(
        f"  worst auto / best planner {worst:.6f} [{check('auto above a planner', worst, 1 + 1e-9, least=False)}], "
        f"median {np.median([line[1] for line in lines]):.4f}"
    )
    print(
        f"  processor time, auto / all other planners together: placing {placing:.2f} "
        f"[{check('auto time, placing', placing, 1.3, least=False)}], placing and serving {whole:.2f} "
        f"[{check('auto time, placing and serving', whole, 1.3, least=False)}]; "
        f"job by job, placing and serving: median {np.median(times[:, :2].sum(1) / times[:, 2:].sum(1)):.2f}, "
        f"most {(times[:, :2].sum(1) / times[:, 2:].sum(1)).max():.2f}"
    )
    if large.any():
        part = times[large]
        print(f"  64 and 128 ranks alone, placing and serving: {part[:, :2].sum() / part[:, 2:].sum():.2f}")
    return {"worst": worst, "placing": placing, "placing and serving": whole, "jobs": lines}


def main():
    sections = {
        "eplb": lambda n: bench_eplb(),
        "traces": bench_traces,
        "forecast": lambda n: bench_forecast(),
        "prophet": lambda n: bench_prophet(),
        "auto": bench_auto,
        "speed": lambda n: bench_speed(),
        "singles": lambda n: bench_singles(asked.jobs, asked.seed),
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[[], *sections], default=[])
    parser.add_argument("--records", type=int, default=3, help="records of each trace")
    parser.add_argument("--jobs", type=int, default=80, help="random jobs of `singles`")
    parser.add_argument("--seed", type=int, default=5, help="of these jobs")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    asked = parser.parse_args()
    results = {name: sections[name](asked.records) for name in asked.sections or sections}
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")
    for line in missed:
        print(f"missed: {line}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
