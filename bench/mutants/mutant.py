"""What a mutant is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Mutant(NamedTuple):
    """`new` in place of `old`, which stands once in `file`; `test` must turn red."""

    name: str  # the defect, in words
    file: str  # below src/moeyard
    old: str
    new: str
    test: str  # pytest's node id

    @property
    def path(self) -> str:
        """From the root of the repository."""
        return f"src/moeyard/{self.file}"


def problem(mutant: Mutant, root: Path = ROOT) -> str:
    """Why a mutant cannot be made any more; empty if it can. It is then the catalogue that must be mended."""
    path = root / mutant.path
    if not path.is_file():
        return f"{mutant.name}: there is no {mutant.path}; name the file that has this code now"
    found = path.read_text(encoding="utf-8").count(mutant.old)
    if found != 1:
        return f"{mutant.name}: {mutant.path} has {mutant.old!r} {found} times, not once; write the text as it is now"
    file, _, name = mutant.test.partition("::")
    function = name.partition("[")[0]
    if not (root / file).is_file() or f"def {function}(" not in (root / file).read_text(encoding="utf-8"):
        return f"{mutant.name}: there is no test {mutant.test}; name one that catches it"
    return ""
