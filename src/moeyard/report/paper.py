"""The page of a paper done again: its tables, and a figure where a table has one."""

from __future__ import annotations

from collections.abc import Sequence

from moeyard.report.page import Page, Section
from moeyard.reproduce.tables import Finding, Paper, show


def paper_page(paper: Paper, findings: Sequence[Finding]) -> Page:
    """A section for each table."""
    sections = [
        Section(
            f.title, f.origins, f"{f.conditions} {f.verdict}", columns=f.names,
            rows=[[show(cell) for cell in row] for row in f.rows], figure=None if f.draw is None else f.draw(),
        )
        for f in findings
    ]  # fmt: skip
    return Page(
        f"{paper.title}: reproduced",
        "The paper's figures beside ours, and a sentence where they differ.",
        [("paper", paper.link)],
        sections,
        footer=f"Written by `moeyard reproduce {paper.name}`.",
    )
