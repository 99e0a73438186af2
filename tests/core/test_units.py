"""Quantities as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard.errors import MoeyardError
from moeyard.units import (
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
    show_bandwidth,
    show_bytes,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("400 Gbit/s", 50e9),
        ("48.85 GB/s", 48.85e9),
        ("100Mbit/s", 12.5e6),
        ("1 GiB/s", 2**30),
        ("1e9", 1e9),
        (7, 7.0),
    ],
)
def test_rates(text, value):
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("10 us", 1e-5), ("10 µs", 1e-5), ("1.5ms", 1.5e-3), ("2 s", 2.0), ("3 ns", 3e-9), (0.1, 0.1)],
)
def test_times(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("256 MB", 256e6), ("64 KiB", 65536), ("8 bit", 1), ("12", 12), ("1 kB", 1000)]
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("parse", [parse_bandwidth, parse_seconds, parse_bytes])
@pytest.mark.parametrize("text", ["", "fast", "10 parsecs", "1.2.3", "-5 MB", "5 MB 3", "GB/s", "nan"])
def test_what_cannot_be_read_is_one_line_with_the_text_and_an_example(parse, text):
    with pytest.raises(MoeyardError) as error:
        parse(text)
    message = str(error.value)
    assert repr(text) in message
    assert "such as" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_bandwidth, "10 GB"), (parse_bandwidth, "10 us"), (parse_bytes, "1 s")]
)
def test_a_unit_of_another_kind_is_refused(parse, text):
    with pytest.raises(MoeyardError, match="unknown unit"):
        parse(text)


@given(st.floats(1e-8, 1e6))
def test_shown_times_read_back_to_three_digits(seconds):
    assert math.isclose(parse_seconds(show_seconds(seconds)), seconds, rel_tol=6e-3)


@given(st.floats(1.0, 1e14))
def test_shown_sizes_and_rates_read_back_to_three_digits(size):
    assert math.isclose(parse_bytes(show_bytes(size)), size, rel_tol=6e-3)
    assert math.isclose(parse_bandwidth(show_bandwidth(size)), size, rel_tol=6e-3)


def test_shown():
    assert show_seconds(1.234e-3) == "1.23 ms"
    assert show_seconds(0) == "0 s"
    assert show_seconds(math.inf) == "inf s"
    assert show_bytes(256e6) == "256 MB"
    assert show_bandwidth(48.85e9) == "48.9 GB/s"
