"""A run's folder as `moeyard train` writes it, with figures from the simulator in place of measured ones."""

import json

import numpy as np

import moeyard as my
from moeyard.advise import IDEAS, Advice, Choice
from moeyard.breakeven import Grid
from moeyard.formats.replays import save_replay
from moeyard.model import STAND_IN
from moeyard.provenance import SIMULATED, Network, Provenance, data_of
from moeyard.replay.result import FIGURES, Replay, Way
from moeyard.report.advice import advice_page
from moeyard.report.paper import paper_page
from moeyard.reproduce import datacenters
from moeyard.reproduce.datacenters import Winner
from moeyard.reproduce.tables import Column, Finding, Paper
from moeyard.timeline import Timeline

SHAPED = Provenance.measured(Network.SHAPED)
EVENT = {"event": "rail lost", "step": 6, "detail": "node 2 rail 1; step repeated"}


def cluster():
    return my.Cluster(4, 4, my.Port(400e6, 1e-4), my.Port(6.25e6, 1e-3), name="4 nodes x 4 rails")


def origins(mode, network=Network.SHAPED):
    """As `moeyard train` labels a mode's figures."""
    crossed, paced = Provenance.measured(network), Provenance.measured(network, emulated=True)
    rows = Provenance.modelled(network) if mode == "plain" else crossed
    return data_of(
        dict.fromkeys(("iteration_s", "tokens_per_s", "wait_s", "parts_s", "spans"), paced)
        | dict.fromkeys(("exchange_s", "gather_s", "x_bound", "events"), crossed)
        | dict.fromkeys(("loss", "balancedness", "overload", "plan_s"), Provenance.measured())
        | {"rows_per_rail": rows}
    )


def stretched(timeline, factor, network=Network.SHAPED):
    """The same course, slower: what a real network might make of it."""
    fields = {
        name: getattr(timeline, name) for name in ("cluster", "traffic", "scheduler", "messages", "cause_M")
    }
    return Timeline(
        **fields,
        start_M=timeline.start_M * factor,
        first_M=timeline.first_M * factor,
        end_M=timeline.end_M * factor,
        provenance=Provenance.measured(network),
    )


def write_run(folder, steps=12, events=(), network=Network.SHAPED):
    machines = cluster()
    traffic = my.workload("zipf:1.2", 16, mb=1.0, row_bytes=1024)
    run = {
        "title": "A Mixtral, trained both ways in the default lab",
        "conditions": {"cluster": "4 nodes x 4 rails of 50 Mbit/s", "law": "ideal", "machine": "2 cores"},
        "emulated": True,
        "network": network.value,
        "modes": ["plain", "moeyard"],
        "summary": {},
    }
    for name, scheduler, slow, balance in (("plain", "direct", 1.3, 0.35), ("moeyard", "rails", 1.1, 0.93)):
        (folder / name).mkdir(parents=True)
        planned = my.simulate(machines, my.schedule(machines, traffic, scheduler))
        planned.save(folder / name / "planned.npz")
        measured = stretched(planned, slow, network)
        measured.save(folder / name / "measured.npz")
        least = my.bound(machines, traffic)
        lines = []
        for step in range(steps):
            exchange = 8 * measured.makespan * (1 + 0.05 * np.sin(step))
            lines.append(
                {
                    "step": step,
                    "loss": 5.5 * np.exp(-step / 9) + 2,
                    "seconds": exchange + 0.8 / balance,
                    "tokens_per_s": 4096 / (exchange + 0.8 / balance),
                    "overload": 1 / balance,
                    "balancedness": balance + 0.02 * np.cos(step),
                    "plan_s": 0.02,
                    "exchange_s": exchange,
                    "gather_s": 0.1 if name == "moeyard" else 0.0,
                    "wait_s": 0.3 * (1 - balance),
                    "x_bound": exchange / 8 / least,
                }
            )
        spans = [
            [("dense", 0.0, 0.1), ("exchange", 0.1, 0.3), ("experts", 0.3, 0.3 + 0.02 * r)] for r in range(16)
        ]
        (folder / name / "spans.json").write_text(json.dumps(spans))
        rows = {"out": measured.rails_out * 1000, "in": measured.rails_in * 1000}
        last = lines[-1]
        run["summary"][name] = {
            "iteration_s": last["seconds"],
            **{k: last[k] for k in last if k not in ("step", "seconds")},
            "rows_per_rail": {way: side.round().tolist() for way, side in rows.items()},
            "parts_s": {
                "exchange": last["exchange_s"],
                "wait": last["wait_s"],
                "plan": last["plan_s"],
                "compute": last["seconds"] - last["exchange_s"] - last["wait_s"] - last["plan_s"],
            },
            "provenance": origins(name, network),
        }
        if name == "moeyard":
            lines += [dict(event) for event in events]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "metrics.jsonl").write_text(text)
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def bench_data():
    machines = cluster()
    cells = []
    for kind in ("balanced", "random", "zipf:1.2", "hot:0.25", "sparse:0.1"):
        traffic = my.workload(kind, 16, mb=2.8, row_bytes=1024)
        least = my.bound(machines, traffic)
        results = []
        for name in ("direct", "ecmp", "spread", "rails", "shot", "fast", "auto"):
            guess = my.estimate(machines, my.schedule(machines, traffic, name))
            seconds = guess * 1.08
            results.append(
                {
                    "scheduler": name, "median_s": seconds, "low_s": 0.95 * seconds, "high_s": 1.06 * seconds,
                    "x_bound": seconds / least, "predicted_s": guess, "busbw": 2.8e6 / seconds,
                }
            )  # fmt: skip
        cells.append({"traffic": kind, "bound_s": least, "results": results})
    measured = dict.fromkeys(("median_s", "low_s", "high_s", "x_bound", "busbw"), SHAPED)
    return {
        "conditions": {"cluster": "4 nodes x 4 rails of 50 Mbit/s"},
        "provenance": data_of(measured | {"predicted_s": SIMULATED}),
        "traffics": cells,
    }


def a_replay(folder, scale=1.0, forecast="ahead"):
    steps = tuple(range(0, 50, 10))
    ways = tuple(
        Way(planner, "auto", {name: scale * factor * np.linspace(1, 2, 5) for name in FIGURES})
        for planner, factor in (("static", 2.0), ("quota", 1.0))
    )
    rows = {"static": np.arange(20.0).reshape(5, 4), "quota": np.ones((5, 4))}
    asked = {"forecast": forecast, "network": "estimate", "overlap": True, "slots": 1}
    found = Replay(
        asked, {"trace": "x"}, steps, np.full(5, 0.5), np.array([np.nan, 0.1, 0.2, 0.1, 0.1]), ways, rows
    )
    folder.mkdir()
    save_replay(found, folder)
    return folder


def an_advice():
    choice = Choice("quota", "auto", 1, 0.5, 0.001, 0.9)
    today = Choice("static", "direct", None, 1.0, 0.001, 0.4)
    alone = dict.fromkeys(IDEAS, today)
    found = Advice(today, alone, choice, choice, 0.2, 0.1, 10**9, None, 3, 2)
    nodes, demand = cluster(), my.Demand(np.full((16, 16), 9))
    placement = my.place(nodes, demand, "static")
    served = my.assign(nodes, demand, placement)
    step = my.simulate_step(nodes, STAND_IN, [placement] * 2, [served] * 2, network="ports")
    grid = Grid(
        "bytes/s of a nic",
        "rows per rank",
        np.array([1e9, 1e10]),
        np.array([10.0, 1e5]),
        np.array([[0.5, -0.2], [0.1, 0]]),
    )
    return advice_page(found, {"trace": "x"}, {"today": step}, [grid], "yr.Yard()")


def a_paper():
    """A table as wide as the map of strategies, with its figure."""
    places = [
        [Winner(gbit, expert, data, (4, 1, 8), 3.0 * expert, (4, 1, 8), 5.0) for data in (6, 24, 96, 192)]
        for gbit in (1, 10, 100)
        for expert in (0.36, 2)
    ]
    rows = [(f"{line[0].gbit:g} Gbit/s, {line[0].expert:g} MB", *map(str, line)) for line in places]
    columns = [Column("wan, expert"), *(Column(f"{data} MB", SIMULATED) for data in (6, 24, 96, 192))]
    found = Finding(
        "Who wins where", "Four datacenters.", columns, rows, "Domains win.", lambda: datacenters._map(places)
    )
    return paper_page(Paper("hybridep", "Experts move", "arXiv 0", {}), [found])
