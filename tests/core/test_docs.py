"""The documents run, and their figures are those of the golden file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench.document import between_marks
from bench.figure import quality_table, with_table
from bench.quality import GOLDEN, Cell, complaints, measure
from bench.stored_figures import FIGURES
from tests import pages
from tests.conftest import ROOT

RANKS = {  # pages whose Python needs a process group, and of how many ranks
    "README.md": 1,
    "docs/checkpoints.md": 2,
    "docs/faults.md": 2,
    "docs/hugging-face.md": 2,
    "docs/lab.md": 1,
    "docs/runtime.md": 2,
    "docs/tutorials.md": 1,
}
LIMIT = 400  # seconds a page; kernels that are not in the cache are compiled in it


def environment():
    return os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Page -> the folder its blocks run in; the pages with ranks have run there already, from one parent."""
    root = tmp_path_factory.mktemp("pages")
    found = {page: root / str(i) for i, page in enumerate(RANKS)}
    for page in pages.pages():
        if page not in RANKS:
            found[page] = root / Path(page).stem
            found[page].mkdir()
    if importlib.util.find_spec("transformers") is not None:
        jobs = [f"{ranks}:{page}" for page, ranks in RANKS.items()]
        command = [sys.executable, str(Path(pages.__file__)), str(root), str(LIMIT), *jobs]
        subprocess.run(command, env=environment(), timeout=LIMIT * len(jobs), check=False)
    return found


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", pages.pages())
def test_every_python_block_runs(page, folders, monkeypatch):
    if not pages.of_kind(page, "python"):
        return
    if page not in RANKS:
        monkeypatch.chdir(folders[page])
        pages.run_python(page)
        return
    pytest.importorskip("transformers")
    for rank in range(RANKS[page]):
        said = folders[page] / f".rank{rank}"
        assert said.exists(), f"rank {rank} did not end within {LIMIT} s"
        assert said.read_text() == "ok", said.read_text()


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", pages.pages())
def test_every_shell_block_runs_or_says_why_not(page, folders, tmp_path):
    wanted = [block for block in pages.of_kind(page, "sh") if not block.exempt]
    if not wanted:
        return
    if page in RANKS:
        pytest.importorskip("transformers")
    command = tmp_path / "moeyard"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moeyard "$@"\n')
    command.chmod(0o755)
    there = environment() | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for block in wanted:
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", block.code],
            cwd=folders[page], env=there, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{page}:{block.line}: {block.code}{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", pages.pages())
def test_no_block_escapes(page):
    for block in pages.blocks((ROOT / page).read_text()):
        if block.kind == "python":
            assert not block.exempt, f"{page}:{block.line}: every Python block runs"
        if block.exempt:
            assert len(block.exempt.split()) >= 4, f"{page}:{block.line}: a reason, not a word"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n\n    moeyard plan\n", "line 3: indented code"),
        ("```\nmoeyard plan\n```\n", "kind ''"),
        ("```bash\nmoeyard plan\n```\n", "kind 'bash'"),
        ("```sh\nmoeyard plan\n", "without an end"),
    ],
)
def test_a_block_that_nobody_would_run_is_an_error(text, says):
    with pytest.raises(ValueError, match=says):
        pages.blocks(text)


def test_a_reason_belongs_to_the_block_below_it():
    text = "<!-- not run: takes an hour here -->\n```sh\na\n```\n\n```sh\nb\n```\n"
    assert [block.exempt for block in pages.blocks(text)] == ["takes an hour here", ""]


def test_a_page_that_fails_is_seen_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("Words\n\n```python\na = 1\n```\n\n```python\nassert a == 2\n```\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(AssertionError) as error:
        pages.run_python("page.md")
    assert error.traceback[-1].lineno + 1 == 8


def test_the_readme_shows_the_golden_figures():
    readme = (ROOT / "README.md").read_text()
    assert with_table(readme, quality_table(json.loads(GOLDEN.read_text()))) == readme


@pytest.mark.parametrize("mark", FIGURES, ids=lambda mark: f"{mark[0]}, {mark[1]}")
def test_a_figure_that_follows_from_what_is_stored_is_what_it_gives(mark):
    page, name = mark
    text = (ROOT / page).read_text()
    assert between_marks(text, name, FIGURES[mark]()) == text, "python -m bench.stored_figures writes it"


def test_marks_stand_alone_or_in_a_sentence():
    for page in (
        "a\n<!-- x: by y -->\nold\n<!-- /x -->\nb",
        "a <!-- x -->old<!-- /x --> b",
        "<!-- x -->\n<!-- /x -->",
    ):
        new = between_marks(page, "x", "new")
        assert "old" not in new
        assert between_marks(new, "x", "new") == new
    with pytest.raises(ValueError, match="0 places"):
        between_marks("no mark", "x", "new")


# A number with a unit, outside code and outside marks: somebody typed it in. Those below are no findings of ours.
FIGURE = re.compile(
    r"(?<![\w.:/-])[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?\s?(?:%|x\b|ms\b|us\b|s\b|[KMG]B/s|[MG]B\b|[MG]bit/s|rows/s|times\b|of \d+)"
    r"|\d(?:\.\d)?e-\d+"
)
TYPED = {  # page -> {line with a figure in it: why it may stand there}
    "README.md": {
        "380 GB/s scale-up, 48.85 GB/s nics, 10 us a message": "conditions of the table",
        "a nic takes 5% longer for each flow": "conditions of the table",
    },
    "docs/checkpoints.md": {
        "EP 2 x DP 2": "a shape; the test named there holds 1e-9",
        "4 ranks killed 50 times": "what the command does",
        "within 256 MB plus twice its bytes": "the limit of the command named there",
        "to 1e-12 (float64)": "the limit of the test named there",
    },
    "docs/placement.md": {
        "more than the paper's 5%": "the paper's claim",
        "a stand-in with 50 MB experts": "an input, STAND_IN",
    },
    "docs/scheduling.md": {"256 MB per rank, 5% loss per flow": "conditions of the table"},
    "docs/simulator.md": {
        "0.5%": "what a tolerance of 0.005 means",
        "13.0, 12.0 and 8.5 s on one small case": "tests/core/test_flow.py holds them",
        "1 MB to 1 GB a rank": "conditions of the figures",
        'in the printed line ("within 2%")': "what the line says",
    },
    "docs/step-model.md": {
        "one home sends every copy of a hot": "tests/core/test_cost.py holds it",
        "one rank sends more than any receives": "tests/core/test_cost.py holds it",
        "skew: all rows for one expert": "tests/core/test_cost.py holds it",
        "reading its 128 Gbit/s as 128 GB/s": "the paper's own",
    },
}


def typed_in(text):
    """Lines with a figure outside code and outside marks."""
    blank = lambda found: "\n" * found[0].count("\n")  # noqa: E731
    text = re.sub(r"<!-- ([\w-]+)\b[^>]*-->.*?<!-- /\1 -->", blank, text, flags=re.S)
    text = re.sub(r"^```.*?^```", blank, text, flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", text)
    return [line for line in text.splitlines() if FIGURE.search(line)]


@pytest.mark.parametrize("page", pages.pages())
def test_no_figure_is_typed_in(page):
    known = TYPED.get(page, {})
    lines = typed_in((ROOT / page).read_text())
    new = [line for line in lines if not any(part in line for part in known)]
    assert not new, (
        f"{page}: put it between marks that a command writes, or say above why it may stand there: {new}"
    )
    gone = [part for part in known if not any(part in line for line in lines)]
    assert not gone, f"{page} no longer has {gone}"


def test_a_typed_in_figure_is_seen():
    page = "Fast.\n<!-- a: by b -->\n3.2 x\n<!-- /a -->\n```sh\nsleep 5 s\n```\nIt is 3.2 x faster.\nAt 90% of it.\n"
    assert typed_in(page) == ["It is 3.2 x faster.", "At 90% of it."]


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
        text = page.read_text()
        made = {
            f"gallery/{name}" for name in re.findall(r" --(?:out|page) ([\w-]+\.html)$", text, re.M)
        }  # by make docs
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert target in made or (page.parent / target).exists(), f"{page.name} links to {target}"
