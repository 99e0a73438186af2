"""docs/papers.md says where an idea is in the code: it is there."""

import importlib
import re

import pytest
from tests.conftest import ROOT

import moeyard as my
from moeyard.reproduce import PAPERS

TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([^`]+)`", TEXT)


@pytest.mark.parametrize("path", sorted({one for one in NAMED if re.fullmatch(r"[\w/]+(\.py|/)", one)}))
def test_every_file_is_there(path):
    assert (ROOT / "src" / "moeyard" / path).exists()


@pytest.mark.parametrize(
    "name", sorted({one for one in NAMED if re.fullmatch(r"(moeyard\.)?[a-z]+\.[a-z_]+", one)})
)
def test_every_function_is_there(name):
    if name.endswith(".py"):
        return
    module, _, function = name.removeprefix("moeyard.").partition(".")
    assert callable(getattr(importlib.import_module(f"moeyard.{module}"), function))


@pytest.mark.parametrize(("kind", "known"), [("scheduler", my.SCHEDULERS), ("planner", my.PLANNERS)])
def test_every_scheduler_and_planner_is_one(kind, known):
    named = [
        name
        for group in re.findall(rf"{kind}s? ((?:`[\w-]+`(?:, )?)+)", TEXT)
        for name in re.findall(r"`([\w-]+)`", group)
    ]
    assert len(named) >= 5
    assert set(named) <= set(known)


def test_every_paper_that_is_reproduced_has_a_chapter():
    for name, paper in PAPERS.items():
        assert f"`moeyard reproduce {name}`" in TEXT
        assert paper.link in TEXT
