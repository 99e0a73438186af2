"""Every family of Hugging Face transformers with routed experts, over 4 ranks, against the unmodified model in one process.

    python -m bench.hf_oracle                 # all; prints the table
    python -m bench.hf_oracle --write         # and writes bench/results/hf_oracle.json and the table of docs/hugging-face.md
    python -m bench.hf_oracle mixtral dbrx    # these only

Each family: a tiny config, 6 experts on 4 ranks (not divisible), 1 to 3 sequences a rank, one rank with all labels masked; outputs,
loss, every gradient before and after clipping, and the clip norm. float64 with and without replicas; float32 with torch's
grouped matmul. Errors are relative to the largest expected value of each tensor.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hf"))

from families import FAMILIES  # noqa: E402
from rounds import play  # noqa: E402

from bench.document import between_marks  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "hf_oracle.json"
PAGE = ROOT / "docs" / "hugging-face.md"
QUANTITIES = ("outputs", "loss", "gradients", "norm")
LIMITS = {"float64": 1e-9, "float32": 1e-4}
WORLD, TIMEOUT = 4, 60


def measure(names: list[str]) -> dict[str, dict]:
    """{family: figures, or the reason why there are none}."""
    plan = [
        ("one_family", WORLD, {"family": name, "dtype_name": dtype, "cases": cases})
        for name in names
        for dtype, cases in (("float64", ("no replicas", "replicas")), ("float32", ("no replicas",)))
    ]
    ranks = play(plan, TIMEOUT, prepare="model_oracle", imports=300)
    found = {}
    for i, name in enumerate(names):
        double, single = ranks[2 * i], ranks[2 * i + 1]
        failed = next((one for one in (*double, *single) if "error" in one), None)
        found[name] = (
            {"reason": reason(failed, [one.get("split", 0.0) for one in double])}
            if failed
            else figures(double, single)
        )
    return found


def figures(double: list[dict], single: list[dict]) -> dict:
    def worst(ranks: list[dict], case: str, *quantities: str) -> float:
        return max(max(one[case][q] for q in quantities) for one in ranks)

    plain = {
        "outputs": worst(double, "no replicas", "outputs"),
        "loss": worst(double, "no replicas", "loss"),
        "gradients": worst(double, "no replicas", "gradients", "clipped"),
        "norm": worst(double, "no replicas", "norm"),
    }
    everything = (*QUANTITIES, "clipped")
    line = {
        "how": double[0]["how"],
        **plain,
        "replicas": worst(double, "replicas", *everything),
        "float32": worst(single, "no replicas", *everything),
        "grouped": sum(one["grouped"] for one in single),
        "experts": double[0]["experts"],
    }
    wrong = [q for q in (*QUANTITIES, "replicas") if not line[q] <= LIMITS["float64"]]
    wrong += ["float32"] if not line["float32"] <= LIMITS["float32"] else []
    if wrong:
        line["reason"] = f"{', '.join(wrong)} differ"
    elif not line["grouped"]:
        line["reason"] = "no grouped matmul was used in float32"
    return line


def reason(failed: dict, splits: list[float]) -> str:
    text = failed["error"].splitlines()[0]
    if max(splits) > 1e-6:
        text += (
            f" (no exact form exists: the unmodified model's own outputs change by {max(splits):.1g} when its batch is "
            f"split, because a token's experts depend on the other tokens)"
        )
    return text


def table(found: dict[str, dict]) -> str:
    head = ["family", "experts found by", *QUANTITIES, "with replicas", "float32"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, line in sorted(found.items(), key=lambda item: "reason" in item[1]):
        if "reason" in line:
            lines.append(f"| {name} | {line.get('how', 'not supported')} | {line['reason']} ||||||")
            continue
        cells = [f"{line[q]:.0e}" for q in (*QUANTITIES, "replicas", "float32")]
        lines.append(f"| {name} | {line['how']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(found: dict[str, dict]) -> str:
    passed = [line for line in found.values() if "reason" not in line]
    if not passed:
        return f"0 of {len(found)} families"
    double = max(max(line[q] for q in (*QUANTITIES, "replicas")) for line in passed)
    single = max(line["float32"] for line in passed)
    return (
        f"{len(passed)} of {len(found)} families; largest error {double:.1e} in float64 (limit 1e-9), "
        f"{single:.1e} in float32 (limit 1e-4)"
    )


def with_table(page: str, found: dict[str, dict]) -> str:
    """The page with what stands between its marks replaced."""
    return between_marks(page, "oracle", f"{summary(found)}\n\n{table(found)}")


def main() -> None:
    given = [one for one in sys.argv[1:] if not one.startswith("-")]
    unknown = set(given) - set(FAMILIES)
    if unknown:
        sys.exit(f"unknown families {sorted(unknown)}; have {sorted(FAMILIES)}")
    found = measure(given or list(FAMILIES))
    print(table(found))
    print(summary(found))
    if "--write" in sys.argv[1:]:
        if given:
            sys.exit("--write needs all families")
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), found))
    sys.exit(0 if sum("reason" not in line for line in found.values()) >= min(45, len(found)) else 1)


if __name__ == "__main__":
    main()
