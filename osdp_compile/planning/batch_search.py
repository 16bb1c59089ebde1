"""The batch size of a rank with the highest throughput, each under its own best plan.

As in OSDP (arXiv 2209.13258, section 3.2): a larger batch hides more communication and leaves
less memory for whole parameters, so that only planning each tells which is best.
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

#: Where the search ends if memory does not end it.
_MOST = 1 << 16
#: From what this batch takes, beside what one sample takes, follows what others take.
_SECOND = 8
#: How much faster half a batch must be for half of that to be tried.
_WORTH_HALVING = 1.01
#: Of a power of two up to the next: sizes that are tried.
_QUARTERS = (4, 5, 6, 7)


@dataclasses.dataclass(frozen=True)
class Tried:
    """One batch size of a rank, and its plan; None if nothing fits under the limit.

    ``samples_per_second``: of all ranks together. ``least_bytes``: the least limit it needs,
    where it does not fit.
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
    """Plan every batch size, in ascending order.

    Args:
        traced: the training step of a batch size.
        sizes: of a rank; empty: the best that is found from the largest whose plan fits without
            effort, up and down as long as that is faster. Each size takes a trace and a plan.

    Raises:
        ValueError: if the sizes are to be found and there is no limit that ends the search.
        InfeasibleLimit: if none fits.
    """
    if not sizes and limit_bytes is None:
        raise ValueError("--batch-sizes auto needs a memory limit, or it would never end")
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
    """Try sizes from about the largest whose peak is below the limit, while that is faster.

    That is where throughput is highest as a rule: more samples hide more communication, until
    activations must be recomputed to make room for them.
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
    """About the largest batch with a peak below the limit, if the peak grows evenly.

    From what batches 1 and :data:`_SECOND` take, or what the latter needs at least.
    """
    one, second = (
        one.least_bytes if one.plan is None else predicted(one.plan).peak_bytes for one in tried
    )
    each_bytes = (second - one) / (_SECOND - 1)
    if each_bytes <= 0:
        return _MOST
    return min(_MOST, max(1.0, 1 + (limit_bytes - one) / each_bytes))


def _grid() -> list[int]:
    """Powers of two and the quarters between them, ascending."""
    sizes = {(1 << power) * quarters // 4 for power in range(17) for quarters in _QUARTERS}
    return sorted(size for size in sizes if 1 <= size <= _MOST)


def _next(size: int) -> int:
    """The size of the grid above one."""
    return next((one for one in _grid() if one > size), 2 * _MOST)


def _rate(tried: Sequence[Tried], batch: int) -> float:
    return next(one.samples_per_second for one in tried if one.batch == batch)
