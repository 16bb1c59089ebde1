"""The batch size of a rank with the highest throughput, each under its own best plan.

As in OSDP (arXiv 2209.13258, section 3.2): a larger batch hides more communication and leaves
less memory for whole parameters, so that only planning each tells which is best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from osdp_compile.errors import InfeasibleLimit
from osdp_compile.options import Search
from osdp_compile.traced_step import TracedStep, predicted
from passes.decisions import Plan
from passes.hardware import Hardware

#: Where the search ends if memory does not end it.
_MOST = 1 << 16


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
        sizes: of a rank; empty: 1, 2, 4 ... up to what fits, and then three sizes between the
            last that fits and the first that does not.

    Raises:
        ValueError: if the sizes are to be found and there is no limit that ends the search.
        InfeasibleLimit: if none fits.
    """
    if not sizes and limit_bytes is None:
        raise ValueError("--batch-sizes auto needs a memory limit, or it would never end")
    tried: list[Tried] = []

    def attempt(batch: int) -> bool:
        say(f"batch {batch}")
        step = traced(batch)
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
    else:
        batch = 1
        while batch <= _MOST and attempt(batch):
            batch *= 2
        for quarters in (5, 6, 7):
            between = batch // 2 * quarters // 4
            if batch // 2 < between < batch and not attempt(between):
                break
    tried.sort(key=lambda one: one.batch)
    if all(one.plan is None for one in tried):
        least = min(one.least_bytes for one in tried)
        raise InfeasibleLimit(
            f"no batch size fits under the memory limit: the smallest, {tried[0].batch}, needs "
            f"{tried[0].least_bytes} bytes",
            least,
        )
    return tried
