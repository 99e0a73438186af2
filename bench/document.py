"""Figures in documents: a script writes what stands between <!-- NAME ... --> and <!-- /NAME -->, nobody else.

The marks stand on lines of their own, or inside a sentence.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def between_marks(page: str, name: str, text: str) -> str:
    """The page with what stands between the marks of `name` replaced."""
    mark = re.compile(rf"(<!-- {name}\b[^>]*-->)(\n?).*?(<!-- /{name} -->)", re.S)
    page, count = mark.subn(lambda found: f"{found[1]}{found[2]}{text}{found[2]}{found[3]}", page)
    if count != 1:
        raise ValueError(f"{count} places marked {name}; one is needed: <!-- {name} --> and <!-- /{name} -->")
    return page


def write_figures(page: str, name: str, text: str) -> None:
    """The same in a file, named from the root of the repository."""
    path = ROOT / page
    path.write_text(between_marks(path.read_text(), name, text))
