"""Arrays told apart by few bytes, and as kernels take them."""

import subprocess
import sys

import numpy as np
import pytest

from moeyard.arrays import blended, frozen, writable


@pytest.mark.parametrize("size", [1, 2, 500, 4095, 4096, 4097, 8192, 50_000])
def test_a_blend_tells_arrays_apart(size):
    """One number changed, two exchanged, one more at the end, the same numbers at other places: each is seen; a copy is the same."""
    values = np.random.default_rng(7).integers(0, 1000, size)
    other, turned, longer = values.copy(), values.copy(), np.append(values, 0)
    other[size // 2] += 1
    turned[[0, -1]] = values[0] + 1, values[-1] - 1  # the same sum
    told = [blended(one) for one in (values, other, longer, np.roll(np.append(values, -1), 1))]
    told += [blended(turned)] if size > 1 else []
    assert len(set(told)) == len(told)
    assert blended(frozen(values.copy())) == told[0]
    assert blended(np.stack([values, other], axis=1)[:, 0]) == told[0]


def test_a_blend_is_the_same_in_every_process():
    values = np.random.default_rng(7).integers(0, 1000, 3000)
    code = (
        "import sys, numpy as np; from moeyard.arrays import blended; "
        "sys.stdout.write(blended(np.frombuffer(sys.stdin.buffer.read(), np.int64)).hex())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], input=values.tobytes(), capture_output=True, check=True
    )
    assert there.stdout.decode() == blended(values).hex()
    # and on every machine: weights come from the generator's own numbers
    assert blended(np.arange(3)).hex() == "0300000000000000614326fa4744c8b3857e3e04bddbc0dc"


def test_kernels_get_arrays_of_one_kind():
    kept = np.arange(6.0).reshape(2, 3)
    assert writable(kept) is kept
    for one in (frozen(kept.copy()), kept.T, kept[:, 1:]):
        taken = writable(one)
        assert taken.flags.c_contiguous
        assert taken.flags.writeable
        assert taken.flags.owndata
        assert (taken == one).all()
