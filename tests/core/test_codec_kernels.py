"""The codecs' kernels against a reference that goes value by value."""

import numpy as np
import pytest
from tests.slow_codec import slow_checksum, slow_message

from moeyard.kernels.codec.bits import decode_bits, encode_bits
from moeyard.kernels.codec.blocks import BLOCK, checksum
from moeyard.kernels.codec.changes import BITS, GROUPS, decode_changes, encode_changes
from moeyard.kernels.codec.pick import decode_pick, encode_pick

FIRST = 4  # words before what a codec writes
CODECS = [("bits", 1), ("bits", 2), ("pick", 4), ("pick", 8), ("pick", 16), ("pick", 32)]


def message(kind, number, master, held):
    """(words, scales, what the sender and the receiver hold)."""
    blocks = -(-len(master) // 1024)
    size = 32 * number if kind == "bits" else 1024 // number // 32 * number.bit_length()
    words = np.full(FIRST + blocks * size + (blocks + 1) // 2, 0xDEADBEEF, np.uint32)
    sender, receiver = held.copy(), held.copy()
    code, read = (encode_bits, decode_bits) if kind == "bits" else (encode_pick, decode_pick)
    code(master, sender, words, words.view(np.uint16), np.int64(FIRST), np.int64(number))
    read(receiver, words, words.view(np.uint16), np.int64(FIRST), np.int64(number))
    assert (words[:FIRST] == 0xDEADBEEF).all()
    scales = words.view(np.uint16)[2 * (FIRST + blocks * size) :][:blocks]
    return (
        words[FIRST : FIRST + blocks * size],
        (scales.astype(np.uint32) << 16).view(np.float32),
        sender,
        receiver,
    )


@pytest.mark.parametrize(("kind", "number"), CODECS)
@pytest.mark.parametrize("width", [1, 31, 1024, 2500, 4096 + 700])
def test_a_message_is_the_slow_one(kind, number, width):
    rng = np.random.default_rng([width, number])
    master = rng.normal(0, 0.05, width).astype(np.float32)
    held = (master + rng.normal(0, 1e-3, width) * rng.choice([0, 1, 30], width)).astype(np.float32)
    words, scales, sender, receiver = message(kind, number, master, held)
    want_words, want_scales, want = slow_message(kind, number, master, held)
    # The sum of magnitudes is taken in another order: it may round to the next bf16.
    assert np.allclose(scales, want_scales, rtol=2**-7, atol=0)
    if (scales == want_scales).all():
        assert (words == want_words).all()
        assert (sender == want).all()
    assert (sender == receiver).all()


@pytest.mark.parametrize(("kind", "number"), CODECS)
def test_what_is_left_over_is_sent_with_the_next_ones(kind, number):
    rng = np.random.default_rng(0)
    master, held = rng.normal(0, 1, 3000).astype(np.float32), np.zeros(3000, np.float32)
    errors = []
    for _ in range(60):
        _, _, held, receiver = message(kind, number, master, held)
        assert (held == receiver).all()
        errors.append(float(np.sqrt(np.mean((master - held) ** 2))))
    assert errors[0] < 0.95
    assert errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize(("kind", "number"), CODECS)
def test_a_value_that_is_no_number_reaches_the_receivers(kind, number):
    master, held = np.full(1024, np.nan, np.float32), np.zeros(1024, np.float32)
    _, _, sender, receiver = message(kind, number, master, held)
    assert np.isnan(sender).any()
    assert (np.isnan(sender) == np.isnan(receiver)).all()


@pytest.mark.parametrize("width", [1, 255, 2048, 5000])
@pytest.mark.parametrize("largest", [0, 1, 40, 65535])
def test_changes_give_back_every_bit(width, largest):
    rng = np.random.default_rng([width, largest])
    before = np.zeros(-(-width // BLOCK) * BLOCK, np.uint16)
    now = before.copy()
    before[:width] = rng.integers(0, 65536, width)
    moves = rng.integers(-largest, largest + 1, width) * (rng.random(width) < 0.3)
    now[:width] = (before[:width].astype(np.int64) + moves) % 65536
    counts = np.zeros(len(now) // BLOCK * GROUPS, np.uint8)
    pairs = np.zeros(len(counts) * BITS, np.uint64)
    used = encode_changes(before, now, counts, pairs)
    assert used == int(counts.sum())
    # A change of at most m, with its sign, needs as many planes as 2 m has bits.
    assert counts.max() <= min(16, int(2 * largest).bit_length())
    held = before.copy()
    decode_changes(held, counts, pairs[:used].copy())
    assert (held == now).all()


def test_no_single_change_leaves_the_checksum_alone():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 500, dtype=np.uint64).astype(np.uint32)
    found = int(checksum(words))
    for some in (words, words[:-1], words[:1], words[:0]):
        assert int(checksum(some)) == slow_checksum(some)
    for place in rng.integers(0, 500, 40):
        changed = words.copy()
        changed[place] ^= np.uint32(1 << int(rng.integers(0, 32)))
        assert int(checksum(changed)) != found
