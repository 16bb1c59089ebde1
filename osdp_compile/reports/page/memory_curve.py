"""Memory curve: bytes of one rank by kind over the simulated step, and the buffers behind them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from osdp_compile.reports.page.contents import Alive, MemoryCurve
from osdp_compile.reports.plan_table import shortened
from passes.simulate.chrome_trace import StepTimeline
from passes.simulate.timeline import Timeline

#: Points of the curve, and buffers that are listed.
MOST_POINTS, MOST_BUFFERS = 1200, 1500
#: Points of the ramp over layers that the graph lacks.
_RAMP = 64
#: Kinds from the lowest in the picture. Others follow, ahead of the last four.
_LOWEST = ("parameters", "optimizer", "inputs")
_HIGHEST = ("gathered", "activations", "communication", "workspace")


def memory_curve(
    step: StepTimeline,
    limit_bytes: int | None,
    measured_peak_bytes: int | None,
    most_points: int = MOST_POINTS,
    most_buffers: int = MOST_BUFFERS,
) -> MemoryCurve:
    """The memory of a step.

    ``most_points``: number of points of the curve. ``most_buffers``: number of listed buffers.
    """
    phases = [_curves(phase) for phase in step.phases]
    kinds = _in_order({kind for _, sizes in phases for kind in sizes})
    starts = [start for start, _ in step.placed()]
    seconds = np.concatenate([at + own for at, (own, _) in zip(starts, phases, strict=True)])
    sizes = np.stack(
        [
            np.concatenate([own.get(kind, np.zeros(len(when))) for when, own in phases])
            for kind in kinds
        ]
    ).astype(np.int64)
    peak = int(sizes.sum(0).argmax())
    kept, moments = _kept(seconds, sizes.sum(0), most_points)
    buffers = [
        one for at, phase in zip(starts, step.phases, strict=True) for one in _buffers(at, phase)
    ]
    buffers.sort(key=lambda one: -one.size_bytes)
    at_peak = float(seconds[peak])
    return MemoryCurve(
        seconds=(*seconds[kept].tolist(), step.step_seconds),
        bytes_by_kind={
            kind: (*own[kept].tolist(), int(own[-1]))
            for kind, own in zip(kinds, sizes, strict=True)
        },
        peak_seconds=at_peak,
        peak_bytes=int(sizes[:, peak].sum()),
        limit_bytes=limit_bytes,
        measured_peak_bytes=measured_peak_bytes,
        moments=moments,
        buffers=tuple(buffers[:most_buffers]),
        unlisted=max(0, len(buffers) - most_buffers),
        peak_buffers=tuple(
            Alive(shortened(one.label), one.kind, one.size_bytes, at_peak, at_peak)
            for one in step.peak.peak_buffers
            if not one.is_part
        )[:most_buffers],
    )


def _in_order(kinds: set[str]) -> list[str]:
    middle = sorted(kinds.difference(_LOWEST, _HIGHEST))
    return [kind for kind in (*_LOWEST, *middle, *_HIGHEST) if kind in kinds]


def _curves(phase: Timeline) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    """Times within a phase, and the bytes of every kind from each time on."""
    if not phase.lives:  # constant, as the optimizer's step
        parts: dict[str, int] = {}
        for buffer in phase.peak_buffers:
            parts[buffer.kind] = parts.get(buffer.kind, 0) + buffer.size_bytes
        return np.zeros(1), {kind: np.array([size]) for kind, size in parts.items()}
    seconds = np.array(phase.places_seconds)
    changes: dict[str, np.ndarray] = {}
    for life in phase.lives:
        own = changes.setdefault(life.buffer.kind, np.zeros(len(seconds) + 1, dtype=np.int64))
        own[life.first] += life.buffer.size_bytes
        own[life.last + 1] -= life.buffer.size_bytes
    found = {kind: own.cumsum()[:-1] for kind, own in changes.items()}
    for kind, size_bytes in phase.base.items():
        found[kind] = found.get(kind, np.zeros(len(seconds), dtype=np.int64)) + size_bytes
    return _with_ramp(phase, seconds, found)


def _with_ramp(
    phase: Timeline, seconds: np.ndarray, sizes: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The curves with straight lines over the time of layers that the graph lacks."""
    gap = phase.left_out
    if gap is None:
        return seconds, sizes
    share = np.arange(1, _RAMP) / _RAMP
    after = gap.last + 1
    between = gap.start_seconds + share * (gap.end_seconds - gap.start_seconds)
    ramps = {}
    for kind, own in sizes.items():
        before = own[gap.first - 1]
        own[gap.first : after] = before
        ramps[kind] = np.insert(own, after, before + share * (own[after] - before))
    return np.insert(seconds, after, between), ramps


def _kept(seconds: np.ndarray, total: np.ndarray, most: int) -> tuple[list[int], int]:
    """Indices of the points to draw, and the number of moments of two points.

    Of several points of one moment, or of neighbouring moments, the highest is kept and the last.
    """
    begins = [0, *(np.flatnonzero(np.diff(seconds)) + 1).tolist()]
    moments = max(1, math.ceil(2 * len(begins) / most))
    begins = [*begins[::moments], len(seconds)]
    found: list[int] = []
    for begin, end in itertools.pairwise(begins):
        highest = begin + int(total[begin:end].argmax())
        found += [highest] if highest == end - 1 else [highest, end - 1]
    return found, moments


def _buffers(at: float, phase: Timeline) -> Sequence[Alive]:
    """The buffers of a phase that starts at second ``at``."""
    ends = (*phase.places_seconds[1:], phase.step_seconds)
    return [
        Alive(
            shortened(life.buffer.label),
            life.buffer.kind,
            life.buffer.size_bytes,
            at + phase.places_seconds[life.first],
            at + ends[life.last],
        )
        for life in phase.lives
    ]
