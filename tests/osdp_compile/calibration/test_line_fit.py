"""The fit: known latencies and bandwidths are found again, also through noise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp_compile.calibration.line_fit import Sample, fit_line, typical_seconds

SIZES = [4096 * 4**i for i in range(8)]
NO_NOISE = [0.0] * len(SIZES)
latencies = st.floats(1e-6, 5e-2)
rates = st.floats(1e-12, 1e-7)


def taken(latency_seconds, seconds_per_byte, noise=NO_NOISE):
    return [
        Sample(size, (latency_seconds + size * seconds_per_byte) * (1 + off))
        for size, off in zip(SIZES, noise, strict=True)
    ]


@given(latencies, rates)
def test_without_noise_the_line_is_found(latency_seconds, seconds_per_byte):
    samples = taken(latency_seconds, seconds_per_byte)
    fit = fit_line(samples)
    for sample in samples:
        found = fit.latency_seconds + fit.seconds_per_byte * sample.wire_bytes
        assert math.isclose(found, sample.seconds, rel_tol=1e-3)
    assert fit.median_error <= fit.worst_error < 1e-3


@pytest.mark.parametrize(
    ("latency_seconds", "seconds_per_byte"), [(1e-3, 2e-8), (2e-5, 2.5e-12), (2e-2, 8e-8)]
)
def test_latency_and_bandwidth_are_told_apart(latency_seconds, seconds_per_byte):
    fit = fit_line(taken(latency_seconds, seconds_per_byte))
    assert fit.latency_seconds == pytest.approx(latency_seconds, rel=1e-6)
    assert fit.seconds_per_byte == pytest.approx(seconds_per_byte, rel=1e-6)


@given(
    latencies,
    rates,
    st.lists(st.floats(-0.1, 0.1), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_through_noise_every_size_is_priced_nearly_right(latency_seconds, seconds_per_byte, noise):
    fit = fit_line(taken(latency_seconds, seconds_per_byte, noise))
    # The true line is off by 0.11 of each sample at most, so the best line's errors have no
    # more than its length, and the two lines differ by no more than both together.
    bound = 2 * 0.112 * math.sqrt(len(SIZES)) * 1.1
    for size in SIZES:
        true = latency_seconds + size * seconds_per_byte
        found = fit.latency_seconds + size * fit.seconds_per_byte
        assert abs(found - true) / true < bound
    assert fit.worst_error <= 0.112 * math.sqrt(len(SIZES))


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-7, 10)), min_size=2, max_size=9))
def test_whatever_was_taken_neither_term_is_zero_or_below(times):
    fit = fit_line([Sample(size, seconds) for size, seconds in times])
    assert fit.latency_seconds > 0 and fit.seconds_per_byte > 0
    assert math.isfinite(fit.latency_seconds) and math.isfinite(fit.seconds_per_byte)


def test_larger_but_faster_is_noise_and_bytes_are_not_free():
    fit = fit_line([Sample(1000, 2e-3), Sample(1_000_000, 1e-3)])
    assert fit.seconds_per_byte == pytest.approx(1e-10)
    assert fit.worst_error > 0.1


def test_small_messages_that_pass_a_shaped_link_at_once_do_not_make_it_faster():
    """As measured at 100 Mbit/s, behind a token bucket: 11.9 MB/s, and not 16."""
    small, large = Sample(2048, 1.2e-4), Sample(524288, 0.0439)
    fit = fit_line([small, large])
    assert fit.seconds_per_byte == pytest.approx(large.seconds / large.wire_bytes, rel=1e-4)
    assert fit.latency_seconds < small.seconds


def test_one_sample_makes_no_line():
    with pytest.raises(ValueError, match="two samples, not 1"):
        fit_line([Sample(1, 1.0)])


@given(st.floats(1e-4, 1.0), st.floats(0, 0.9), st.integers(7, 30), st.data())
def test_one_late_message_of_many_that_alternate_changes_nothing(each, swing, count, data):
    times = [each * (1 + swing * (-1) ** i) for i in range(count)]
    late = data.draw(st.integers(0, count - 1))
    times[late] += data.draw(st.floats(0, 100))
    assert math.isclose(typical_seconds(times), each)


def test_a_single_time_is_typical_and_none_is_an_error():
    assert typical_seconds([3.0]) == 3.0
    with pytest.raises(ValueError):
        typical_seconds([])
