"""Prices: what a candidate costs, judged by the simulation of another one near it.

A candidate y is judged by an evaluated candidate x:

* *Memory.* ``M(y, p) = M(x, p) + sum over i of m(i, y, p) - m(i, x, p) + spared(x, p) -
  spared(y, p)`` at every place p. M(x, p) is simulated, without overlap; m is in
  ``footprints.py``; spared are the bytes of recomputed tensors
  (``passes/candidates/recompute_sets.py``).
* *Time.* ``T(y) = T(x) + computing(y) - computing(x) + e(y) - e(x)``. The exposed seconds e of the
  forward and of the backward have two parts. A collective is *starved* if the memory at the places
  that it would overlap is too small for it: all its seconds are exposed. The others *queue*:
  ``max(0, N - h)`` of their N seconds are exposed; h are the seconds that x hides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from passes.candidates.candidate import Candidate
from passes.pricing.evaluator import PlanEvaluator, above_target
from passes.pricing.footprints import Footprints

#: Price of a second of communication that is hidden: of two equal plans the one with less.
_LEAST_WEIGHT = 0.01


class Forecast(NamedTuple):
    """A judged candidate, before it is lowered.

    ``peak_bytes``: without overlap. ``above``: the sum over all places of the bytes above the
    target.
    """

    peak_bytes: int
    above: int
    seconds: float

    @property
    def rank(self) -> tuple[int, float]:
        """The objective, as of an evaluated candidate (:meth:`PlanEvaluator.rank`)."""
        return self.above, self.seconds


class Prices:
    """The judges of an evaluator's candidates."""

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self._evaluator, self.footprints = evaluator, Footprints(evaluator)
        self._near: dict[Candidate, Reference] = {}

    def near(self, key: Candidate) -> Reference:
        """The judge by an evaluated candidate."""
        if key not in self._near:
            self._near[key] = Reference(self._evaluator, self.footprints, key)
        return self._near[key]


class Reference:
    """Judges candidates by the evaluated candidate ``key``.

    ``fixed``: bytes at each place that depend on no decision and no recomputation; None if memory
    does not restrict the search.
    """

    def __init__(self, evaluator: PlanEvaluator, footprints: Footprints, key: Candidate) -> None:
        self._evaluator, self._footprints, self.key = evaluator, footprints, key
        self._found = found = evaluator.seen[key]
        self._totals = footprints.totals(key)
        self._before = np.concatenate([[0.0], np.cumsum(found.seconds_at)])  # by place
        spared_bytes, self._recompute_seconds = self._recomputation(key)
        self.fixed: np.ndarray | None = None
        self._starved = 0.0, 0.0
        if found.bytes_at is not None and evaluator.is_short:
            self.fixed = found.bytes_at - footprints.bytes_of(key) + spared_bytes
            self._starved = self._starved_seconds(key, found.bytes_at)
        self._queued = [
            max(0.0, exposed - starved)
            for exposed, starved in zip(found.exposed_seconds, self._starved, strict=True)
        ]
        self._hidden = [
            max(0.0, network - queued)
            for network, queued in zip(found.network_seconds, self._queued, strict=True)
        ]
        self._forecasts: dict[Candidate, Forecast] = {}

    @property
    def weights(self) -> tuple[float, float]:
        """The exposed shares of the forward's and of the backward's communication."""
        forward, backward = (
            min(1.0, max(_LEAST_WEIGHT, exposed / network)) if network else 1.0
            for exposed, network in zip(
                self._found.exposed_seconds, self._found.network_seconds, strict=True
            )
        )
        return forward, backward

    def judge(self, key: Candidate) -> Forecast:
        """The peak without overlap, and the step's seconds, that this simulation promises."""
        found = self.judge_within(key)
        assert found is not None
        return found

    def judge_within(
        self, key: Candidate, most_above: float = math.inf, most_seconds: float = math.inf
    ) -> Forecast | None:
        """The same; None if it promises more bytes above the target, or as many seconds."""
        found = self._forecasts.get(key) or self._judged(key, most_above, most_seconds)
        if found is None or found.above > most_above or found.seconds >= most_seconds:
            return None
        self._forecasts[key] = found
        return found

    def unchosen(self, structure: Candidate) -> np.ndarray:
        """Bytes at each place without the parameters'; only under a memory limit."""
        assert self.fixed is not None
        found: np.ndarray = self.fixed - self._recomputation(structure)[0]
        return found

    def _judged(self, key: Candidate, most_above: float, most_seconds: float) -> Forecast | None:
        found, totals = self._found, self._footprints.totals(key) - self._totals
        _, recompute_seconds = self._recomputation(key)
        seconds = found.prediction.step_seconds + totals[2]
        seconds += recompute_seconds - self._recompute_seconds
        for phase in (0, 1):
            network = found.network_seconds[phase] + totals[phase]
            seconds += max(0.0, network - self._hidden[phase]) - self._queued[phase]
            seconds -= self._starved[phase]
        peak_bytes = above = 0
        starved = self._starved
        target_bytes = self._evaluator.target_bytes
        if self.fixed is not None and target_bytes is not None:
            if seconds >= most_seconds:
                return None
            bytes_at = self.unchosen(key) + self._footprints.bytes_of(key)
            peak_bytes, above = int(bytes_at.max()), above_target(bytes_at, target_bytes)
            if above > most_above:
                return None
            starved = self._starved_seconds(key, bytes_at)  # takes most of the time
        return Forecast(peak_bytes, above, float(seconds + sum(starved)))

    def _recomputation(self, key: Candidate) -> tuple[np.ndarray, float]:
        """Bytes that a candidate's recomputation spares at each place, and its seconds."""
        found, seconds = np.zeros(self._footprints.places, dtype=np.int64), 0.0
        if key.recompute:
            recomputation = self._evaluator.recomputation
            found[:-1], seconds = recomputation.spared(key.recompute, key.also_save)
        return found, seconds

    def _starved_seconds(self, key: Candidate, bytes_at: np.ndarray) -> tuple[float, float]:
        """Seconds of collectives without the memory to overlap compute, by phase.

        Earlier collectives take the memory that they need from later ones.
        """
        ctx = self._evaluator.ctx
        if not ctx.limit_bytes:
            return 0.0, 0.0
        free = ctx.limit_bytes - bytes_at
        starved = [0.0, 0.0]
        place, kind, size_bytes, seconds = self._footprints.overlaps(key)
        if not len(place):
            return 0.0, 0.0
        now = self._before[place]
        # A gradient lives until the end of its reduction, a gathered weight from the start of its
        # gather.
        reduces = kind == 2
        first = np.minimum(np.searchsorted(self._before, now - seconds), place - 1)
        last = np.maximum(np.searchsorted(self._before, now + seconds), place + 2)
        start = np.where(reduces, place + 1, np.maximum(first, 0))
        stop = np.minimum(np.where(reduces, last, np.maximum(place, 1)), len(free))
        stop = np.maximum(start, stop)
        # Where all find the memory, none is without it: only the other places are looked at.
        taken = np.zeros(len(free) + 1, dtype=np.int64)
        np.add.at(taken, start, size_bytes)
        np.subtract.at(taken, stop, size_bytes)
        short = np.flatnonzero(free < np.cumsum(taken)[:-1])
        start, stop, free = np.searchsorted(short, start), np.searchsorted(short, stop), free[short]
        for index in np.flatnonzero(start < stop).tolist():
            window = free[start[index] : stop[index]]
            if window.min() < size_bytes[index]:
                starved[min(kind[index], 1)] += seconds[index]
            else:
                window -= size_bytes[index]
        return starved[0], starved[1]
