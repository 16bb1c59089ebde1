"""Sizes and times as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.types.units import (
    format_bytes,
    format_limit,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (1, 1),
        (123456789, 123456789),
        ("1", 1),
        ("17 B", 17),
        ("2KB", 2_000),
        ("500MB", 500_000_000),
        ("3 gb", 3_000_000_000),
        ("1TB", 10**12),
        ("2KiB", 2_048),
        ("180MiB", 180 << 20),
        ("1.5 GiB", 3 << 29),
        (" .5 gib ", 1 << 29),
        ("8.GiB", 8 << 30),
        ("1tib", 1 << 40),
    ],
)
def test_sizes_that_are_understood(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("4GB", "4 GB"),
        ("80GB", "80 GB"),
        ("1.5GB", "1.5 GB"),
        ("500MB", "500 MB"),
        ("8GiB", "8 GiB"),
        ("1.5 GiB", "1.5 GiB"),
        ("180MiB", "180 MiB"),
        ("3KiB", "3 KiB"),
        (123_456_789, "117.74 MiB"),
        ("462.12 KiB", "462.12 KiB"),
    ],
)
def test_a_limit_is_echoed_in_the_unit_it_was_given_in(given, echoed):
    assert format_limit(parse_bytes(given)) == echoed


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, True, False, 1.5, None, b"1GiB", [1], ""),
        *("GiB", "-1GiB", "0", "0.0 GiB", "0.1 B", "1 GiBs", "1 GG", "1e3", "1,5GiB"),
        *("1GiB 2MiB", "8 gallons", "nan", "inf"),
    ],
)
def test_everything_else_is_a_value_error_that_says_what_is_allowed(value):
    with pytest.raises(ValueError, match=r"is not a size.*give a whole number of bytes") as error:
        parse_bytes(value)
    assert repr(value) in str(error.value)
    for unit in ("'8GiB'", "'500MB'", "KB", "KiB", "TiB"):
        assert unit in str(error.value)


@given(st.integers(min_value=1, max_value=1 << 50))
def test_what_is_printed_reads_back_to_half_a_hundredth_of_its_unit(size_bytes):
    text = format_bytes(size_bytes)
    unit = parse_bytes("1 " + text.split(" ")[1])
    assert abs(parse_bytes(text) - size_bytes) <= 0.005 * unit + 1
    assert format_bytes(-size_bytes) == "-" + text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (180 << 20, "180.00 MiB"),
        (5 << 28, "1.25 GiB"),
        (3 << 40, "3.00 TiB"),
        (5000 << 40, "5000.00 TiB"),
    ],
)
def test_sizes_print_in_powers_of_1024(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (4.2e-5, "42 us"),
        (0.0034, "3.4 ms"),
        (1.0, "1.00 s"),
        (83.456, "83.46 s"),
        (-0.5, "-500.0 ms"),
    ],
)
def test_times_print_in_the_unit_that_reads_best(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (2, 2.0),
        (0.3, 0.3),
        ("300ms", 0.3),
        ("300 MS", 0.3),
        (" 2.5s ", 2.5),
        (".5 us", 5e-7),
        ("2min", 120.0),
    ],
)
def test_durations_that_are_understood(given, seconds):
    assert parse_seconds(given) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "given",
    [0, -1.0, "0ms", "-3ms", "300", "300h", "ms", "", True, None, float("inf"), float("nan")],
)
def test_other_durations_name_the_units(given):
    with pytest.raises(ValueError, match=r"is not a duration: .*\(us, ms, s, min\)"):
        parse_seconds(given)
