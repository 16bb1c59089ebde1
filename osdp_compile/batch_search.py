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
from osdp_compile.traced_step import TracedStep, predicted
from passes.decisions import Plan
from passes.hardware import Hardware

#: Where the search ends if memory does not end it.
_MOST = 1 << 16
#: From what this batch needs at least, beside what one sample needs, follows what others need.
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
        sizes: of a rank; empty: the largest that fits, of powers of two and the quarters between,
            and from there down by halves as long as that is 1 % faster. Each takes a trace and a
            plan, so the largest is looked for where the least memory of two sizes says that it is.

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
        assert limit_bytes is not None
        say(f"memory of batches 1 and {_SECOND}")
        one, second = (traced_once(b).least_bytes(ranks, hardware) for b in (1, _SECOND))
        _largest(attempt, _fitting(one, second, limit_bytes))
        _faster_halves(attempt, tried)
    tried.sort(key=lambda one: one.batch)
    if all(one.plan is None for one in tried):
        least = min(one.least_bytes for one in tried)
        raise InfeasibleLimit(
            f"no batch size fits under the memory limit: the smallest, {tried[0].batch}, needs "
            f"{tried[0].least_bytes} bytes",
            least,
        )
    return tried


def _fitting(one_bytes: int, second_bytes: int, limit_bytes: int) -> float:
    """About the largest batch that fits, if the least memory grows evenly with the batch.

    ``one_bytes``, ``second_bytes``: of batches 1 and :data:`_SECOND`.
    """
    each_bytes = (second_bytes - one_bytes) / (_SECOND - 1)
    if each_bytes <= 0:
        return _MOST
    return min(_MOST, max(1.0, 1 + (limit_bytes - one_bytes) / each_bytes))


def _grid(most: int) -> list[int]:
    """Powers of two and the quarters between them, ascending."""
    sizes = {(1 << power) * quarters // 4 for power in range(17) for quarters in _QUARTERS}
    return sorted(size for size in sizes if 1 <= size <= most)


def _largest(attempt: Callable[[int], bool], about: float) -> None:
    """Try sizes from about the largest, up to the first that does not fit or down to one that does.
    """
    sizes = _grid(_MOST)
    place = max(index for index, size in enumerate(sizes) if size <= about)
    while place > 0 and not attempt(sizes[place]):
        place -= 1
    for size in sizes[place + 1 :]:
        if not attempt(size):
            return


def _faster_halves(attempt: Callable[[int], bool], tried: list[Tried]) -> None:
    """Try half of the largest that fits, and half of that, while each is clearly faster."""

    def rate(batch: int) -> float:
        return next(one.samples_per_second for one in tried if one.batch == batch)

    batch = max(one.batch for one in tried if one.plan is not None)
    while batch > 1:
        half = batch // 2
        if not attempt(half) or rate(half) <= _WORTH_HALVING * rate(batch):
            return
        batch = half
