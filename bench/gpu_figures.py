"""Figures of the documents that were measured on a GPU, from what is stored in bench/results.

    python -m bench.gpu_figures

Prints all of them; `python -m bench.stored_figures` writes them into the pages.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from bench.faults.table import clean, on_gpu

RESULTS = Path(__file__).parent / "results"
CASE = ("optimizer", "how", "precision", "layers", "accumulation", "checkpointing")
ALIKE = 1.1  # times: two ratios of the same steps that are nearer than that do not contradict one another


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def block() -> str:
    """Shares of the matmul ceiling and peaks of the expert block, beside Hugging Face's."""
    conditions, *rows = rows_of("gpu_block.jsonl")
    lines = [
        "| shape | choices | ceiling TF/s | share of it | Hugging Face | peak GB | Hugging Face | peak / Hugging Face's | least / Hugging Face's | beyond weights and gradients |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (one for one in rows if "hf_share" in one):
        figures = [
            f"{row['ceiling']:.0f}", f"{row['share']:.2f}", f"{row['hf_share']:.2f}", f"{row['peak']:.1f}", f"{row['hf_peak']:.1f}",
            f"{row['peak'] / row['hf_peak']:.2f}", f"{row['least'] / row['hf_peak']:.2f}",
            f"{row['beyond'] / row['hf_beyond']:.2f}",
        ]  # fmt: skip
        lines.append(" | ".join([f"| {row['shape']}", row["choices"], *figures]) + " |")
    tiny = [one for one in rows if one["shape"] == "tiny"]
    first = next(one for one in rows if one["shape"].startswith("initial"))
    read = [one for row in tiny for one in row["layer_readings_ms"]]
    told = (
        f"{conditions['conditions']}. Host time of a tiny `MoELayer`, forward + backward, one rank: {statistics.median(read):.2f} ms in the median of "
        f"{len(read)} readings in {len(tiny)} runs, from {min(read):.2f} to {max(read):.2f}; of Hugging Face's block alone, with a router: "
        f"{_readings(tiny, 'hf_host')}. A Mixtral layer's experts drawn in {first['seconds']:.2f} s."
    )
    return "\n".join([*lines, "", told])


def _readings(rows: list[dict], what: str) -> str:
    medians, least = (
        ", ".join(f"{one[f'{what}{kind}']:.1f}" for one in rows) for kind in ("_ms", "_best_ms")
    )
    return f"{medians} ms (best {least})"


def held(row: dict) -> bool:
    return row["difference"] <= row["tolerance"] and row["copies"] > 0 and row["moved"]


def launches() -> str:
    heads = "| scheduler | way | stages | launches | a stage | memory | must hold | host | all_to_all_single's |\n|---|---|---|---|---|---|---|---|---|"
    line = "| {scheduler} | {way} | {stages} | {launches} | {a_stage:.2f} | {memory:.2f} | {must_hold:.2f} | {host_us:.0f} us | {torch_host_us:.0f} us |"
    return "\n".join([heads, *(line.format(**row) for row in rows_of("gpu_launches.jsonl"))])


def oracle() -> str:
    """What bench/gpu_oracle.py printed."""
    where, *lines, ended = (RESULTS / "gpu_oracle.txt").read_text().splitlines()
    worst = {
        kind: max(
            float(word) for line in lines if line.startswith(kind) for word in line.split() if "e-" in word
        )
        for kind in ("float32", "bfloat16")
    }
    errors = " and ".join(f"{value:.1e} in {kind}" for kind, value in worst.items())
    return f"Last on {where}: {ended.partition(';')[0]}, with relative errors up to {errors} (the one process computes in that dtype, too)."


def ahead() -> str:
    """The step with experts that travel behind it against the same in turn, and how its streams ran."""
    turns, beside = (json.loads((RESULTS / f"gpu_ahead{one}.json").read_text()) for one in ("", "_mps"))
    return (
        f"Last on one {turns['gpu']}, torch {turns['torch']}, {turns['ranks']} NCCL ranks that share it over sockets. Their kernels in turns: "
        f"{_overlapped(turns)} Side by side under NVIDIA's MPS: {_overlapped(beside)} The order of all kernels is in "
        f"`bench/results/gpu_ahead.json` and `gpu_ahead_mps.json`."
    )


def _overlapped(row: dict) -> str:
    took = row["seconds"]
    agree = 1 / ALIKE < took["serialised"] / took["overlapped"] / row["ratio"] < ALIKE
    doubt = (
        ""
        if agree
        else " (the pairs and the medians of each way disagree: these steps vary more than they differ)"
    )
    return (
        f"a step takes {took['serialised']:.2f} s in turn and {took['overlapped']:.2f} s overlapped, {row['ratio']:.2f} x in the median of "
        f"{row['pairs']} pairs{doubt}; losses are within {row['difference']:.1e} of those where experts are gathered on the spot (bf16); in the "
        f"profile of a step experts travel for {row['experts_us'] / 1e3:.0f} ms on streams of their own, and "
        f"{row['under_compute_us'] / row['compute_us']:.0%} of the time of the training's kernels falls into that."
    )


def replicas() -> str:
    """The table of replicas on NCCL: a line for each number of ranks, whose cases may have been run in parts."""
    lines = [
        "| NCCL ranks on one GPU | of the cases | in runs | ran | hold | refused by torch | copies compared | largest difference |",
        "|---" * 8 + "|",
    ]
    runs = rows_of("gpu_replicas.jsonl")
    for ranks in sorted({found["ranks"] for found in runs}):
        some = [found for found in runs if found["ranks"] == ranks]
        cases = [one for found in some for one in found["cases"]]  # one that was run twice counts twice
        covered = len({tuple(one[key] for key in CASE) for one in cases})
        ran = [one for one in cases if "refused" not in one]
        copies, worst = sum(one["copies"] for one in ran), max(one["difference"] for one in ran)
        which = "all" if covered == some[0]["of"] else f"{covered} of {some[0]['of']}"
        figures = (
            ranks,
            which,
            len(some),
            len(ran),
            sum(map(held, ran)),
            len(cases) - len(ran),
            copies,
            f"{worst:.1e}",
        )
        lines.append("| " + " | ".join(map(str, figures)) + " |")
    steps = max(one["steps"] for found in runs for one in found["cases"])
    flaws = [found["named"]["flaw"] for found in runs if found["named"]["flaw"]]
    fine = "none stale, none another's"
    told = (
        f"So many of the {runs[0]['of']} cases, {steps} steps each (`python -m bench.replicas --backend nccl` with `--ranks`, `--worlds`, `--every`, "
        f"`--skip`). {sum(found['named']['looked'] for found in runs)} named rows and experts looked at under autocast: "
        f"{'; '.join(flaws) or fine}."
    )
    return "\n".join([*lines, "", told])


def faults() -> str:
    """Faults on NCCL as they were last run, with what was not clean."""
    rows = json.loads((RESULTS / "gpu_faults.json").read_text())
    bad = sum(not clean(row) for row in rows)
    told = (
        f"{len(rows)} faults on one GPU, {rows[0]['ranks']} NCCL ranks each (`python -m bench.gpu_faults`), {bad} not clean: survivors "
        f"hung."
        if bad
        else f"{len(rows)} faults on one GPU, {rows[0]['ranks']} NCCL ranks each (`python -m bench.gpu_faults`), all clean."
    )
    return f"{on_gpu(rows)}\n\n{told}"


def main() -> None:
    for figure in (block, launches, oracle, ahead, replicas, faults):
        print(figure(), end="\n\n")


if __name__ == "__main__":
    main()
