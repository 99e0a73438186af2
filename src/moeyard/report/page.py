"""The page itself: sections of text, tables and figures in one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

# What a figure may be. Every section names at least one.
BADGES = {
    "measured": "taken with a clock while real bytes crossed the network",
    "simulated": "what the flow simulator says of the same plan",
    "estimated": "closed form, no simulation",
    "emulated accelerator": "real maths, then a wait until rows / rate has passed",
    "published": "as printed in the paper",
}


@dataclass(frozen=True, slots=True)
class Section:
    """One card of a page. `columns` and `rows` make a table; `figure` follows it."""

    title: str
    kinds: Sequence[str]  # keys of BADGES
    note: str = ""
    figure: go.Figure | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    strong: Sequence[int] = ()  # rows to set in bold
    wide: bool = True  # half cards stand side by side


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    lead: str
    conditions: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    headlines: Sequence[tuple[str, str]] = field(default=())  # (figure, what it is)
    footer: str = ""

    def html(self) -> str:
        """The whole file. Figures are drawn by the copy of plotly.js inside it."""
        cards = [(section, _figure(section, i)) for i, section in enumerate(self.sections)]
        return _template().render(page=self, cards=cards, badges=BADGES, plotly=get_plotlyjs())


def badges(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """(name, meaning) of each; an unknown one is a KeyError: no figure goes out with a label nobody explained."""
    return [(kind, BADGES[kind]) for kind in kinds]


@cache
def _template() -> jinja2.Template:
    source = files("moeyard.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["labels"] = badges
    return environment.from_string(source)


def _figure(section: Section, number: int) -> str:
    if section.figure is None:
        return ""
    config = {"displayModeBar": False, "responsive": True}  # a drag zooms, a double click resets
    html: str = section.figure.to_html(
        full_html=False, include_plotlyjs=False, config=config, div_id=f"figure-{number}"
    )
    return html
