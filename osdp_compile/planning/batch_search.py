"""Batch search: the batch size per rank with the highest throughput, each with its own best plan.

As in OSDP (arXiv 2209.13258, section 3.2): a larger batch hides more communication and leaves less
memory for whole parameters. So only a plan for each size shows the best one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from osdp_compile.errors import InfeasibleLimit
from osdp_compile.options import Search
from osdp_compile.planning.traced_step import TracedStep, predicted
from passes.types.hardware import Hardware
from passes.types.plan import Plan

#: The largest batch size of the search.
_MOST = 1 << 16
#: The peaks of batch 1 and of this batch give the estimate for other batches.
_SECOND = 8
#: Necessary speed-up of half a batch to try half of that.
_WORTH_HALVING = 1.01
#: Quarters of a power of two that the search tries.
_QUARTERS = (4, 5, 6, 7)


@dataclasses.dataclass(frozen=True)
class Tried:
    """A batch size per rank, and its plan; None: no plan fits under the limit.

    ``samples_per_second``: of all ranks together. ``least_bytes``: the lowest feasible limit, if
    no plan fits.
    """

    batch: int
    step: TracedStep
    plan: Plan | None
    samples_per_second: float = 0.0
    least_bytes: int = 0


def best_batch(
    traced: Callable[[int], TracedStep],
    sizes: Sequence[int],
    ranks: Mapping[str, int],
    hardware: Hardware,
    limit_bytes: int | None,
    say: Callable[[str], None] = lambda text: None,
    search: Search = "quick",
) -> list[Tried]:
    """Plan for every batch size; results in ascending order of the size.

    Args:
        traced: batch size -> its training step.
        sizes: per rank; empty: a search from about the largest size that fits, up or down as long
            as the throughput grows. Each size takes a trace and a plan.

    Raises:
        ValueError: for a search of sizes without a limit, which would not end.
        InfeasibleLimit: if no size fits.
    """
    if not sizes and limit_bytes is None:
        raise ValueError(
            "--batch-sizes auto needs a memory limit: without one every batch size fits"
        )
    tried: list[Tried] = []

    traced_once = functools.cache(traced)
    tried_sizes: dict[int, bool] = {}

    def attempt(batch: int) -> bool:
        if batch not in tried_sizes:
            tried_sizes[batch] = plan_for(batch)
        return tried_sizes[batch]

    def plan_for(batch: int) -> bool:
        say(f"batch {batch}")
        step = traced_once(batch)
        try:
            plan = step.plan(ranks, hardware, limit_bytes, search, say)
        except InfeasibleLimit as error:
            tried.append(Tried(batch, step, None, least_bytes=error.least_bytes))
            return False
        samples = batch * math.prod(ranks.values()) / predicted(plan).step_seconds
        tried.append(Tried(batch, step, plan, samples))
        return True

    if sizes:
        for batch in sorted(set(sizes)):
            attempt(batch)
    elif attempt(1):
        attempt(_SECOND)
        assert limit_bytes is not None
        _climb(attempt, tried, limit_bytes)
    tried.sort(key=lambda one: one.batch)
    if all(one.plan is None for one in tried):
        least = min(one.least_bytes for one in tried)
        raise InfeasibleLimit(
            f"no batch size fits under the memory limit: the smallest, {tried[0].batch}, needs "
            f"{tried[0].least_bytes} bytes",
            least,
        )
    return tried


def _climb(attempt: Callable[[int], bool], tried: Sequence[Tried], limit_bytes: int) -> None:
    """Search from about the largest size whose peak is below the limit, while it gets faster.

    Throughput usually peaks there: more samples hide more communication, until their activations
    need recomputation to fit.
    """

    def faster(size: int, best: int, times: float = 1.0) -> bool:
        return attempt(size) and _rate(tried, size) > times * _rate(tried, best)

    sizes = [size for size in _grid() if size <= _about(tried, limit_bytes)]
    while not attempt(sizes[-1]):
        sizes.pop()
    best = sizes[-1]
    if faster(_next(best), best):
        best = _next(best)
        while 2 * best <= _MOST and faster(2 * best, best):
            best *= 2
        while _next(best) <= _MOST and faster(_next(best), best):
            best = _next(best)
        return
    while best > 1 and faster(best // 2, best, _WORTH_HALVING):
        best //= 2


def _about(tried: Sequence[Tried], limit_bytes: int) -> float:
    """Estimate of the largest batch with a peak below the limit, for a linear peak.

    The line goes through the peaks of batches 1 and :data:`_SECOND`, or the lowest feasible limit
    of the latter.
    """
    one, second = (
        one.least_bytes if one.plan is None else predicted(one.plan).peak_bytes for one in tried
    )
    each_bytes = (second - one) / (_SECOND - 1)
    if each_bytes <= 0:
        return _MOST
    return min(_MOST, max(1.0, 1 + (limit_bytes - one) / each_bytes))


def _grid() -> list[int]:
    """Powers of two, with three evenly spaced sizes between neighbours, ascending."""
    sizes = {(1 << power) * quarters // 4 for power in range(17) for quarters in _QUARTERS}
    return sorted(size for size in sizes if 1 <= size <= _MOST)


def _next(size: int) -> int:
    """The next larger size of the grid."""
    return next((one for one in _grid() if one > size), 2 * _MOST)


def _rate(tried: Sequence[Tried], batch: int) -> float:
    return next(one.samples_per_second for one in tried if one.batch == batch)
