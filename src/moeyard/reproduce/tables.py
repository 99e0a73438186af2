"""What a reproduction gives: tables with the paper's figures beside ours, and a sentence on each difference.

A verdict is worked out from the figures it speaks of, by a function of them alone: other figures, another verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeyard.provenance import Provenance, by_source, data_of


class Column(NamedTuple):
    """Of a table. A column of figures says where they come from; one that names the rows does not."""

    name: str
    provenance: Provenance | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One table of a paper, done again."""

    title: str
    conditions: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str | float]]
    verdict: str  # the sentence: what agrees, what differs, and why
    draw: Callable[[], Any] | None = None  # a figure, for a page

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def origins(self) -> dict[Provenance, str]:
        """Where the figures come from, and which columns."""
        return by_source((c.name, c.provenance) for c in self.columns if c.provenance is not None)

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "title": self.title,
            "conditions": self.conditions,
            "columns": self.names,
            "provenance": data_of({c.name: c.provenance for c in self.columns if c.provenance is not None}),
            "rows": [list(row) for row in self.rows],
            "verdict": self.verdict,
        }


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


def show_origins(origins: Mapping[Provenance, str]) -> str:
    """`FAST: published, arXiv 2505.09764; ours: modelled, simulated network`."""
    return "; ".join(f"{names}: {one}" if names else str(one) for one, names in origins.items())


def to_markdown(paper: Paper, findings: Sequence[Finding]) -> str:
    """A chapter of docs/reproduce.md."""
    lines = [f"## {paper.title}", "", f"{paper.link}. Printed by `moeyard reproduce {paper.name}`.", ""]
    for finding in findings:
        lines += [f"### {finding.title}", "", f"*{show_origins(finding.origins)}.* {finding.conditions}", ""]
        lines.append(f"| {' | '.join(finding.names)} |")
        lines.append("|---" * len(finding.columns) + "|")
        lines += [f"| {' | '.join(show(cell) for cell in row)} |" for row in finding.rows]
        lines += ["", finding.verdict, ""]
    return "\n".join(lines)


def percent(ratio: float) -> str:
    """+20% for 1.2."""
    return f"{ratio - 1:+.0%}"


def span(values: Sequence[float]) -> str:
    """-54%..-29%, of changes."""
    return f"{min(values):+.0%}..{max(values):+.0%}"


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


def ranked(values: Mapping[str, float]) -> list[str]:
    """Names, the largest value first."""
    return sorted(values, key=lambda name: -values[name])


def either(holds: bool, yes: str, no: str) -> str:
    """A sentence that the figures choose."""
    return yes if holds else no
