"""The public names, each in a process that has imported nothing else: what is put on a noun must be there at its first use."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moeyard


@pytest.mark.parametrize(
    "use",
    [
        "my.Cluster.load('h200-4x8').num_ranks == 32",
        "callable(my.Timeline.load) and callable(my.Timeline.save) and callable(my.Timeline.to_chrome)",
        "all(getattr(my, name) is not None for name in my.__all__)",
    ],
)
def test_a_first_use_finds_everything(root, use):
    code = f"import moeyard as my; assert {use}"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_face_loads_no_compiler(root):
    code = "import sys, moeyard; assert not {'numba', 'numpy', 'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_the_package_travels_to_other_processes_by_name():
    assert pickle.loads(pickle.dumps(moeyard)) is moeyard


def test_the_changelog_begins_with_this_version_or_what_is_not_released():
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    named = re.findall(r"^## (\S+)", text, re.M)
    assert next(one for one in named if one != "Unreleased") == moeyard.__version__
    assert "Unreleased" not in named[1:]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", one) for one in named if one != "Unreleased")
