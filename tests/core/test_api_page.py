"""docs/api.md has every public name, from where it is defined."""

import ast
import importlib
import re

import pytest
from tests.conftest import ROOT

import moeyard as my

TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^::: (\S+)$", TEXT, re.M)


def public(package):
    """`__all__` as written, so that torch is not needed."""
    tree = ast.parse((ROOT / "src" / "moeyard" / package / "__init__.py").read_text(encoding="utf-8"))
    found = [one.value for one in tree.body if isinstance(one, ast.Assign) and one.targets[0].id == "__all__"]
    return ast.literal_eval(found[0])


@pytest.mark.parametrize("name", [*my.__all__, *public("runtime")])
def test_every_public_name_is_there(name):
    if name == "load_trace":
        assert "`moeyard.load_trace` is `find_trace`" in TEXT
    elif name.isupper() or name.startswith("__"):
        assert f"`moeyard.{name}`" in TEXT
    else:
        assert name in {one.rpartition(".")[2] for one in LISTED}


@pytest.mark.parametrize("name", LISTED)
def test_what_is_listed_is_defined_there_and_says_what_it_is(name):
    module, _, thing = name.rpartition(".")
    if module.startswith("moeyard.runtime"):
        pytest.importorskip("torch")
    made = getattr(importlib.import_module(module), thing)
    assert made.__module__ == module
    assert made.__doc__


def test_nothing_is_listed_twice():
    assert len(set(LISTED)) == len(LISTED)
