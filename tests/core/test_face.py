"""The public names, each in a process that has imported nothing else: what is put on a noun must be there at its first use."""

import pickle
import subprocess
import sys

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
