"""Line fit: latency and inverse bandwidth of a collective from measured seconds."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np

_LEAST_LATENCY_SECONDS = 1e-7
_LEAST_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of one collective that sends ``wire_bytes`` from a rank."""

    wire_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """``latency_seconds + wire_bytes * seconds_per_byte``, with its errors.

    ``median_error``, ``worst_error``: over the samples, ``|fitted - measured| / measured``.
    """

    latency_seconds: float
    seconds_per_byte: float
    median_error: float
    worst_error: float


def typical_seconds(times: Sequence[float]) -> float:
    """Seconds of one collective of a sequence: the median over the means of neighbouring pairs.

    Pairs: a shaped link lets a burst of bytes pass at once and delays the next collective, so short
    and long times may alternate. Median: sometimes one collective takes half its time longer,
    because the machine does other work; a mean of a few would be off by a tenth.

    >>> typical_seconds([1.0, 3.0, 1.0, 3.0, 1.0])
    2.0
    >>> typical_seconds([2.0, 2.0, 9.0, 2.0, 2.0, 2.0])
    2.0

    Raises:
        ValueError: for an empty sequence.
    """
    if len(times) < 2:
        return statistics.median(times)
    return statistics.median((one + other) / 2 for one, other in itertools.pairwise(times))


def fit_line(samples: Sequence[Sample]) -> Fit:
    """The line with the least squares of relative errors.

    Relative errors, because sizes span four orders of magnitude and a plan has collectives of all
    of them; absolute squares would weight only the largest. Neither term is negative. If the
    latency would be, the largest sample alone sets the seconds per byte: a shaped link passes small
    messages faster than its rate, so they say nothing about large ones. If noise would make the
    seconds per byte zero or negative, they are a tenth of the least seconds per byte of a sample.

    >>> fit = fit_line([Sample(1_000, 0.001), Sample(1_001_000, 0.003)])
    >>> f"{fit.latency_seconds:.6f} s, {fit.seconds_per_byte:.3g} s a byte"
    '0.000998 s, 2e-09 s a byte'

    Raises:
        ValueError: for fewer than two samples.
    """
    if len(samples) < 2:
        raise ValueError(f"a line needs two samples, not {len(samples)}")
    seconds = np.array([s.seconds for s in samples])
    wire_bytes = np.array([s.wire_bytes for s in samples])
    u, v = 1 / seconds, wire_bytes / seconds
    # Minimise |latency * u + rate * v - 1|. Of columns of length 1, the rank tells whether there is
    # more than one size.
    columns = np.stack((u, v), axis=1)
    lengths = np.linalg.norm(columns, axis=0)
    found, _, rank, _ = np.linalg.lstsq(columns / lengths, np.ones_like(u), rcond=1e-6)
    latency, rate = (found / lengths).tolist()
    if rank < 2 or latency < _LEAST_LATENCY_SECONDS:
        latency = _LEAST_LATENCY_SECONDS
        largest = max(samples, key=lambda s: s.wire_bytes)
        rate = (largest.seconds - latency) / max(largest.wire_bytes, 1)
    if rate <= 0:
        rate = _LEAST_SHARE * min(s.seconds / s.wire_bytes for s in samples if s.wire_bytes)
        latency = max(float(u @ (1 - rate * v) / (u @ u)), _LEAST_LATENCY_SECONDS)
    errors = np.abs(latency * u + rate * v - 1).tolist()
    return Fit(latency, rate, statistics.median_high(errors), max(errors))
