"""The documents run, and their figures are those of the golden file."""

from __future__ import annotations

import json
import re

import pytest
from bench.figure import quality_table, with_table
from bench.quality import GOLDEN, Cell, complaints, measure
from tests.conftest import ROOT

PAGES = ("README.md", "docs/scheduling.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_example_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


def test_the_readme_shows_the_golden_figures():
    readme = (ROOT / "README.md").read_text()
    assert with_table(readme, quality_table(json.loads(GOLDEN.read_text()))) == readme


def test_the_readme_counts_the_families_that_the_oracle_passed():
    found = json.loads((ROOT / "bench" / "results" / "hf_oracle.json").read_text())
    passed = sum("reason" not in one for one in found.values())
    assert f"{passed} of the {len(found)} MoE families" in (ROOT / "README.md").read_text()


def test_the_golden_file_keeps_every_promise():
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) == 360
    for name, ratios in golden.items():
        nodes, mb, kind, law = re.match(r"(\d+) nodes, (\d+) MB, ([^,]+), (.+)", name).groups()
        assert complaints(Cell(int(nodes), int(mb), kind, law), ratios) == []


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("kind", ["random", "zipf:0.9", "zipf-pairs:0.9", "hot", "sparse:0.1"])
def test_the_golden_file_is_what_the_code_does(nodes, kind):
    golden = json.loads(GOLDEN.read_text())
    for mb, law in ((1, "ideal"), (64, "loss 0.05"), (256, "loss 0.05")):
        cell = Cell(nodes, mb, kind, law)
        assert measure(cell) == pytest.approx(golden[str(cell)], rel=2e-3), str(cell)


def test_no_document_names_a_link_that_does_not_exist():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
