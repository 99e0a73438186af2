"""Papers done again: the parts, the command, and the page it writes."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import moeyard as my
from moeyard.cli.app import app
from moeyard.reproduce import PAPERS, Finding, Paper
from moeyard.reproduce.rails import lpt_loads, shared_evenly

FINDING = Finding(
    "A table", ["simulated"], "Small.", ("case", "theirs", "ours"), [("a", "1.0", 1.5)], "Ours is larger."
)
PAPER = Paper("rails", "A paper", "arXiv 0", {"one": lambda: FINDING})


def test_longest_first_moves_every_byte_once():
    cluster = my.Cluster(3, 2, my.Port(1e9, 0), my.Port(1e8, 0))
    traffic = my.workload("random", 6, mb=1.0, row_bytes=1000)
    node = cluster.node_R
    between = traffic.rows[node[:, None] != node[None, :]].sum() * 1000
    for chunk in (None, 50_000.0):
        out, received = lpt_loads(cluster, traffic, chunk)
        assert np.isclose(out.sum(), between)
        assert np.isclose(received.sum(), between)


def test_rows_are_shared_evenly_and_none_is_lost():
    rows = np.array([[7, 4], [0, 9]])
    cut = shared_evenly(rows, 4)
    assert cut.shape == (2, 8)
    assert (cut.reshape(2, 2, 4).sum(axis=2) == rows).all()
    assert cut.reshape(2, 2, 4).max() - 1 <= rows.max() // 4


def test_the_command_prints_writes_its_chapter_and_a_page(monkeypatch, tmp_path):
    monkeypatch.setitem(PAPERS, "rails", PAPER)
    document = tmp_path / "reproduce.md"
    document.write_text(
        "before\n<!-- rails: written by moeyard reproduce rails -->\nold\n<!-- /rails -->\nafter\n"
    )
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["reproduce", "rails", "--document", str(document), "--page", str(page)])
    assert done.exit_code == 0, done.output
    assert "Ours is larger." in done.output
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| a | 1.0 | 1.5 |" in text
    assert "old" not in text
    assert "published" in page.read_text()


def test_the_command_gives_json(monkeypatch):
    monkeypatch.setitem(PAPERS, "rails", PAPER)
    done = CliRunner().invoke(app, ["reproduce", "rails", "--json"])
    assert json.loads(done.stdout)["tables"][0]["verdict"] == "Ours is larger."


@pytest.mark.parametrize(
    "arguments", [["rials"], ["rails", "--only", "none"], ["rails", "--only", "one", "--document", "x"]]
)
def test_wrong_names_are_errors(monkeypatch, arguments):
    monkeypatch.setitem(PAPERS, "rails", PAPER)
    done = CliRunner().invoke(app, ["reproduce", *arguments])
    assert isinstance(done.exception, my.MoeyardError)


def test_every_chapter_is_in_the_document(root):
    text = (root / "docs" / "reproduce.md").read_text()
    for paper in (p for p in (PAPERS["rails"], PAPERS["fast"])):
        assert f"## {paper.title}" in text
