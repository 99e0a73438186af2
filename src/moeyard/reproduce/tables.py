"""What a reproduction gives: tables with the paper's figures beside ours, and a sentence on each difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One table of a paper, done again."""

    title: str
    kinds: Sequence[str]  # how ours came about: simulated, estimated, measured
    conditions: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    verdict: str  # the sentence: what agrees, what differs, and why


@dataclass(frozen=True, slots=True)
class Paper:
    name: str
    title: str
    link: str
    findings: Mapping[str, Callable[[], Finding]]  # short name -> work


def show(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def to_markdown(paper: Paper, findings: Sequence[Finding]) -> str:
    """A chapter of docs/reproduce.md."""
    lines = [f"## {paper.title}", "", f"{paper.link}. Printed by `moeyard reproduce {paper.name}`.", ""]
    for finding in findings:
        lines += [f"### {finding.title}", "", f"*{', '.join(finding.kinds)}.* {finding.conditions}", ""]
        lines.append(f"| {' | '.join(finding.columns)} |")
        lines.append("|---" * len(finding.columns) + "|")
        lines += [f"| {' | '.join(show(cell) for cell in row)} |" for row in finding.rows]
        lines += ["", finding.verdict, ""]
    return "\n".join(lines)


def percent(ratio: float) -> str:
    """+20% for 1.2."""
    return f"{ratio - 1:+.0%}"


def inside(values: Sequence[float], low: float, high: float) -> str:
    """How a range of ours lies to a claimed one, in words."""
    least, most = min(values), max(values)
    if least >= low and most <= high:
        return "inside the claimed range"
    if least > high:
        return "beyond the claimed range"
    if most < low:
        return "below the claimed range"
    return "overlapping the claimed range"
