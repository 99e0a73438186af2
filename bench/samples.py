"""python -m bench.samples: write examples/traces/, one small file of each form of routing that `moeyard replay` reads.

All of them hold the same choices: two steps of two layers, four ranks with twelve tokens each, top-2 of eight experts. Forms that do
not say which rank a row came from hold their sums.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "traces"
STEPS, LAYERS, RANKS, TOKENS, EXPERTS, TOP_K = (10, 20), 2, 4, 12, 8, 2


def choices() -> dict[tuple[int, int, int], list[list[int]]]:
    """(step, layer, rank) -> the experts of each token; expert 3 is hot."""
    rng = np.random.default_rng(0)
    weight = np.array([1, 1, 1, 6, 1, 2, 1, 1]) / 14
    return {
        (step, layer, rank): [
            rng.choice(EXPERTS, TOP_K, replace=False, p=weight).tolist() for _ in range(TOKENS)
        ]
        for step in STEPS
        for layer in range(LAYERS)
        for rank in range(RANKS)
    }


def counts() -> np.ndarray:
    """[step, layer, rank, expert]."""
    found = np.zeros((len(STEPS), LAYERS, RANKS, EXPERTS), dtype=np.int64)
    for (step, layer, rank), tokens in choices().items():
        found[STEPS.index(step), layer, rank] = np.bincount(np.ravel(tokens), minlength=EXPERTS)
    return found


def write(folder: Path = FOLDER) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    rows = counts()
    lines = [
        json.dumps(
            {"step": s, "layer": m, "rank": r, "topk": TOP_K, "num_experts": EXPERTS, "top_indices": tokens}
        )
        for (s, m, r), tokens in choices().items()
    ]
    (folder / "megatron.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    logical = torch.from_numpy(rows.sum(axis=2).astype(np.int32))
    torch.save({"rank": 0, "logical_count": logical}, folder / "sglang.pt")
    np.save(folder / "loads.npy", rows.sum(axis=2))
    (folder / "loads.json").write_text(
        json.dumps({"loads": rows.sum(axis=2)[0].tolist()}) + "\n", encoding="utf-8"
    )
    np.savetxt(folder / "loads.csv", rows.sum(axis=2)[0], fmt="%d", delimiter=",")
    table = ["step,layer,rank,expert,rows"]
    for (i, m, r, e), count in np.ndenumerate(rows):
        if count:
            table.append(f"{STEPS[i]},{m},{r},{e},{count}")
    (folder / "table.csv").write_text("\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
    print("\n".join(str(path) for path in sorted(FOLDER.iterdir())))
