"""Codecs of experts: what training with decoded copies costs, in loss and bytes, and how fast they are.

    python -m bench.codec [--json] [--trials 0 3 ...] [--steps N] [--seeds N] [--size tiny | small] [--device cpu] [--jobs N] [--out FILE] [--speed]

A byte-level MoE is trained on the standard library's source from scratch, the seeds side by side. `at home`: the part of the rows that
are computed by their experts' homes, with exact weights; the others are computed with what receivers hold, and all gradients go to the
masters: one half is two datacenters with a copy of every expert in the other, none is the worst case. Loss: of the masters, held out,
mean of five points over the last tenth of the steps, against the same seeds uncompressed. Bytes: of a message with its head, against
bf16. --jobs: so many trials at once, a process each. --out: trials that are in the file are not run again. --speed: encode and decode instead, processor time of one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.codec_model import SMALL, TINY
from bench.codec_study import RATE, text, train
from bench.codec_trial import Trial

HALF = {"share": 0.5}
TRIALS = [
    Trial("none"),
    Trial("bits:1", **HALF),
    Trial("pick:8", **HALF),
    Trial("frozen"),
    Trial("pick:16", **HALF),
    Trial("residual:16", **HALF),
    Trial("residual:32", **HALF),
    Trial("residual:50", **HALF),
    Trial("bits:1"),
    Trial("pick:8"),
    Trial("topk:32", **HALF),
    Trial("topk:50", **HALF),
    Trial("bits:1", memory=False, **HALF),
    Trial("pick:16"),
    Trial("bits:2", **HALF),
    Trial("bits:1", every=2, **HALF),
    Trial("residual:16"),
    Trial("pick:8", glide=0.9, heed=0.05, **HALF),
]
SIZES = {"tiny": TINY, "small": SMALL}
GOALS = ((15.0, 0.005), (30.0, 0.015))  # times fewer bytes, loss over uncompressed
SPEED_CODECS = ("bits:1", "bits:2", "pick:8", "pick:16", "lossless")
WIDTH, ROUNDS = 3 << 19, 120


def describe(trial: dict) -> str:
    extra = {
        "memory": "what is left over is lost",
        "glide": f"receivers glide on by {trial['glide']}, heed {trial['heed']}",
        "every": f"every {trial['every']} steps",
    }
    plain = asdict(Trial(trial["name"]))
    return "; ".join([trial["name"], *(words for key, words in extra.items() if trial[key] != plain[key])])


def over(row: dict, base: dict, key: str = "held_out") -> list[float]:
    """Per seed."""
    return [a / b - 1 for a, b in zip(row[key], base[key], strict=True)]


def table(rows: list[dict]) -> str:
    """Markdown: loss over uncompressed, mean and per seed."""
    base = next(row for row in rows if row["trial"]["name"] == "none")
    lines = [
        "| codec | at home | bytes against bf16 | loss over uncompressed | per seed |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row is base:
            continue
        share, found = row["trial"]["share"], over(row, base)
        frozen = row["trial"]["name"] == "frozen"
        home = "" if frozen else f"{share:.0%}"
        times = "none sent" if frozen else f"{row['against_bf16']:.1f} x fewer"
        each = ", ".join(f"{one:+.1%}" for one in found)
        lines.append(
            f"| {describe(row['trial'])} | {home} | {times} | {statistics.mean(found):+.2%} | {each} |"
        )
    return "\n".join(lines)


def speed() -> list[dict]:
    """GB/s of weights, counted as bf16, through encode and decode together."""
    from moeyard.runtime.codec.coders import decode, encode
    from moeyard.runtime.codec.exact import decode_exact, encode_exact, halves_of
    from moeyard.runtime.codec.spec import Codec

    torch.set_num_threads(1)
    master = torch.randn(WIDTH) * 0.05
    found = []
    for name in SPEED_CODECS:
        codec, least = Codec.parse(name), [float("inf")] * 2
        moved = master + 1e-3 * torch.randn(WIDTH)
        for _ in range(ROUNDS):
            held = moved.clone()
            if codec.exact:
                before, now = halves_of(held.bfloat16()), halves_of(master.bfloat16())
                began = time.process_time()
                words = torch.from_numpy(encode_exact(before, now))
                between = again = time.process_time()
                decode_exact(before, words)
            else:
                words, receiver = torch.zeros(codec.words(WIDTH), dtype=torch.int32), held.clone()
                began = time.process_time()
                encode(codec, master, held, words)
                between = again = time.process_time()
                decode(codec, receiver, words)
            ended = time.process_time()
            least = [min(least[0], between - began), min(least[1], ended - again)]
        rates = [2 * WIDTH / seconds / 1e9 for seconds in (*least, sum(least))]
        found.append(
            {"codec": name, "encode": rates[0], "decode": rates[1], "both": rates[2], "words": len(words)}
        )
    return found


def stored() -> str:
    """For the document, from bench/results."""
    folder = Path(__file__).parent / "results"

    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    study, fast, gpu = rows("codec.jsonl"), rows("codec_speed.jsonl"), rows("gpu_codec.jsonl")
    sizes = SIZES[study[0]["size"]]
    rates = ", ".join(f"{row['codec']} {row['both']:.2f}" for row in fast)
    shares = ", ".join(f"{row['codec']} {row['bytes_per_s'] / row['copy_bytes_per_s']:.2f}" for row in gpu)
    return (
        f"{table(study)}\n\n"
        f"A byte-level MoE of {sizes.layers} layers of {sizes.experts} experts, {sizes.width} x {sizes.inner}, top-{sizes.top_k}, AdamW at a constant "
        f"{RATE:g} from scratch, {study[0]['steps']} steps of {sizes.tokens} tokens, {len(study[0]['seeds'])} seeds, on CPU in float32; the loss is that of the "
        f"masters, held out. *At home*: rows that exact weights compute: a half is two datacenters with a copy of every expert in the other, 0% "
        f"the worst case. `residual:N` is the paper's codec, shared expert (not counted in its bytes) and top-k. "
        f"`frozen`: experts that never train.\n\n"
        f"GB/s of weights, counted as bf16, through encode and decode together, one core (`python -m bench.codec --speed`): {rates}. "
        f"Share of the copy bandwidth on one {gpu[0]['device']}, messages as the slow reference has them (`python -m bench.gpu_codec --json`): {shares}."
    )


def one_trial(number: int, given: argparse.Namespace) -> dict:
    """In a process of its own, on one core."""
    torch.set_num_threads(1)
    device, seeds = torch.device(given.device), list(range(given.seeds))
    row = train(SIZES[given.size], TRIALS[number], seeds, given.steps, device, text())
    return row | {"size": given.size, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trials", type=int, nargs="+", default=list(range(len(TRIALS))))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args()
    if given.speed:
        rows = speed()
        for row in rows:
            print(
                json.dumps(row)
                if given.json
                else "{codec}: {both:.2f} GB/s ({encode:.2f}, {decode:.2f})".format(**row)
            )
        return
    rows = []
    if given.out is not None and given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text().splitlines()]
    missing = [n for n in given.trials if not any(row["trial"] == asdict(TRIALS[n]) for row in rows)]
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(one_trial, number, given) for number in missing]):
            rows.append(done.result())
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    rows.sort(key=lambda row: [asdict(one) for one in TRIALS].index(row["trial"]))
    print("\n".join(map(json.dumps, rows)) if given.json else table(rows))


if __name__ == "__main__":
    main()
