"""Figures of the documents that follow from what is stored (bench/results, the golden file) or built in (labs, models).

    python -m bench.stored_figures [--check]

Each stands between marks of its own; a test holds that the pages show what this gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from bench import codec, gpu_figures, spread_state, versions
from bench.document import ROOT, between_marks
from bench.faults import table
from bench.mutants import table as mutants
from bench.quality import GOLDEN, Cell, cells
from moeyard.formats.models import load_model
from moeyard.lab import DEFAULT, LabSpec
from moeyard.reproduce.fast import SYNTHESIS_MS

RESULTS = ROOT / "bench" / "results"
RANKS = 8  # a node


def stored(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def promise() -> str:
    """How far `auto` is above the best of the others over the golden table."""
    golden = json.loads(GOLDEN.read_text())
    above = []
    for cell in cells():
        ratios = golden[str(cell)]
        others = [x for name, x in ratios.items() if name != "auto"]
        above.append(ratios["auto"] / min(others) - 1)
    every: list[Cell] = list(cells())
    nodes, sizes = sorted({c.nodes for c in every}), sorted({c.mb for c in every})
    kinds = len({c.workload for c in every})
    return (
        f"Over all {len(every)} cells ({nodes[0]} to {nodes[-1]} nodes, {sizes[0]} to {sizes[-1]} MB, {kinds} workloads, both laws) `auto` is at "
        f"most {max(0.0, max(above)):.1%} above the best of the others."
    )


def families() -> str:
    found = stored("hf_oracle.json")
    return f"{sum('reason' not in one for one in found.values())} of the {len(found)} MoE families"


def folders() -> str:
    found = stored("hf_folders.json")
    return f"{sum(one.startswith('same bits') for one in found.values())} of {len(found)} families"


def ns3() -> str:
    """The contention law fitted to TCP incast, and how far it is off."""
    large, small = stored("ns3_incast.json"), stored("ns3_incast_1mb.json")
    law, cases = large["law"], large["cases"]
    jump = max(cases, key=lambda c: c["slowdown"])
    fall = min((c for c in cases if c["senders"] > 4), key=lambda c: c["slowdown"])
    off = [abs(c["difference"]) for c in cases]
    quick = max(1 - c["ideal_s"] / c["ns3_s"] for c in cases)
    return (
        f"  ns-3 {large['ns3']}, incast of {cases[0]['senders']} to {cases[-1]['senders']} senders of {large['bytes'] / 1e6:g} MB: loss {law['loss']:.2f}, knee "
        f"{law['knee']:.1f}, ceiling {law['ceiling']:.2f}. The slowdown jumps where a time-out hits ({jump['slowdown']:.2f} at {jump['senders']} senders) and "
        f"falls where none does ({fall['slowdown']:.2f} at {fall['senders']}). Under the law `simulate` is within {max(off):.0%} of every point, "
        f"{statistics.mean(off):.0%} on average; without it up to {quick:.0%} too quick. With {small['bytes'] / 1e6:g} MB a single time-out is most of the "
        f"time, and the law is off by up to {max(abs(c['difference']) for c in small['cases']):.0%}."
    )


def lab() -> str:
    """The default lab's sizes, and what compute costs beside the wire, there and on real machines."""
    spec = LabSpec.load(DEFAULT)
    cluster, rate = spec.cluster, 400e9 / 8
    ratios = ", ".join(
        f"{model.row_seconds / (model.row_bytes / rate):.1f} for {name}"
        for name in ("olmoe-1b-7b", "deepseek-v3", "mixtral-8x7b")
        for model in (load_model(name, tokens_per_rank=8192).but(flops=400e12),)
    )
    return (
        f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {cluster.nics_per_node} rails of {cluster.scale_out.bandwidth * 8 / 1e6:g} Mbit/s, "
        f"and accelerators of {spec.compute:,.0f} rows/s: an expert computes a row of 512 bytes in "
        f"{1 / spec.compute / (512 / spec.seen.scale_out.bandwidth):.1f} of the time that a nic takes to carry it. On 400 Gbit/s nics and 400 TFLOP/s that is {ratios}."
    )


def theirs() -> str:
    return ", ".join(
        f"{ms:g} ms at {nodes * RANKS}" for nodes, ms in SYNTHESIS_MS.items() if nodes in (8, 40)
    )


def once() -> str:
    """Tokens that cross to a node once in the lab, paired."""
    found = stored("once_lab.json")
    lines = [
        f"In {found['lab']} (float32 rows of {4 * found['width']} bytes, scheduler `auto`, the median of so many pairs, and the bound under which the",
        'median lies in 95% of such trials; top-2 with `dedup="auto"`):',
        "",
        "| tokens | each for itself | once | once / each | below | bytes between nodes | pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        seconds = " | ".join(f"{row[key] * 1e3:.0f} ms" for key in ("each_s", "once_s"))
        figures = " | ".join(f"{row[key]:.2f}" for key in ("ratio", "upper", "bytes_ratio"))
        lines.append(f"| {name} | {seconds} | {figures} | {row['pairs']} |")
    return "\n".join(lines)


FIGURES = {  # (page, mark) -> what stands there
    ("README.md", "promise"): promise,
    ("README.md", "families"): families,
    ("docs/checkpoints.md", "folders"): folders,
    ("README.md", "versions"): versions.stored_table,
    ("docs/faults.md", "faults"): table.of_campaign,
    ("docs/faults.md", "nccl"): gpu_figures.faults,
    ("docs/faults.md", "mutants"): mutants.told,
    ("docs/runtime.md", "codec"): codec.stored,
    ("docs/simulator.md", "ns3"): ns3,
    ("docs/runtime.md", "once"): once,
    ("docs/runtime.md", "block"): gpu_figures.block,
    ("docs/runtime.md", "oracle"): gpu_figures.oracle,
    ("docs/runtime.md", "launches"): gpu_figures.launches,
    ("docs/runtime.md", "overlapped"): gpu_figures.ahead,
    ("docs/runtime.md", "replicas-nccl"): gpu_figures.replicas,
    ("docs/step-model.md", "spread_state"): spread_state.table,
    ("docs/train.md", "lab"): lab,
    ("docs/scheduling.md", "theirs"): theirs,
}


def shown() -> dict[str, str]:
    """Page -> its text with every figure as it should be."""
    pages: dict[str, str] = {}
    for (page, mark), figure in FIGURES.items():
        text = pages.get(page) or (ROOT / page).read_text()
        pages[page] = between_marks(text, mark, figure())
    return pages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page differs")
    check = parser.parse_args().check
    other = [page for page, text in shown().items() if (ROOT / page).read_text() != text]
    print("\n".join(f"{page}: {'differs' if check else 'written'}" for page in other) or "nothing to write")
    if check:
        sys.exit(bool(other))
    for page, text in shown().items():
        (ROOT / page).write_text(text)


if __name__ == "__main__":
    main()
