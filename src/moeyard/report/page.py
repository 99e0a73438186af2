"""The page itself: sections of text, tables and figures in one HTML file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from moeyard.provenance import Provenance

_NUMBER = re.compile(r"[-+<>~]?\d|-$|$")  # what begins so is one


@dataclass(frozen=True, slots=True)
class Section:
    """One card of a page; it cannot be made without saying where its figures come from. `columns` and `rows` make a table; `figure` follows it."""

    title: str
    origins: Mapping[Provenance, str]  # where its figures come from, and which (none named: all of them)
    note: str = ""
    figure: go.Figure | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    strong: Sequence[int] = ()  # rows to set in bold
    wide: bool = True  # half cards stand side by side

    def __post_init__(self) -> None:
        if not self.origins:
            raise ValueError(f"{self.title}: no provenance; a figure goes out with where it comes from")


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
        return _template().render(page=self, cards=cards, plotly=get_plotlyjs())


class Badge(NamedTuple):
    kind: str  # how it looks
    text: str
    meaning: str  # for whoever points at it


def badges(origins: Mapping[Provenance, str]) -> list[Badge]:
    """One for each place that figures come from: source, network and accelerator together, so that none is read with another's."""
    return [
        Badge(one.source.value, f"{names}: {one}" if names else str(one), one.meaning)
        for one, names in origins.items()
    ]


def wordy(section: Section) -> list[bool]:
    """Which columns hold words: they begin at the left, and may break. Numbers with their units do neither."""
    return [
        any(not _NUMBER.match(str(cell)) for cell in column) for column in zip(*section.rows, strict=True)
    ]


@cache
def _template() -> jinja2.Template:
    source = files("moeyard.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["labels"] = badges
    environment.globals["wordy"] = wordy
    return environment.from_string(source)


def _figure(section: Section, number: int) -> str:
    if section.figure is None:
        return ""
    config = {"displayModeBar": False, "responsive": True}  # a drag zooms, a double click resets
    html: str = section.figure.to_html(
        full_html=False, include_plotlyjs=False, config=config, div_id=f"figure-{number}"
    )
    return html
