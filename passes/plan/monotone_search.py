"""Monotone search: a planner whose step time never rises with more memory.

A single search (``passes/plan/planner.py``) takes a different path under every limit, and may end
at a slower plan with more memory. The monotone search runs one search for each limit of a fixed
*limit grid*, up to the given limit, and returns the fastest of their plans. Memory above the
highest grid limit is not used. A larger limit has the same grid limits and perhaps further ones.
The cost is one search per grid limit, which suits a plan that is made once before a long training.

A plan keeps the grid limit that it is found for: with more memory, its collectives would get
another schedule than the predicted one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from passes.capture.fold_layers import Folded
from passes.graph.captured import Captured
from passes.pipeline import Pass
from passes.plan.planner import Infeasible, least_limit, make_plan
from passes.types.context import Context
from passes.types.plan import Plan, Prediction
from passes.types.units import format_limit

#: Number of evenly spaced grid limits between a power of two and its double. Round numbers, such
#: as 8, 24, 46 or 80 GiB, are grid limits.
_RUNGS = 32


class MonotoneSearch:
    """The searches under the limit grid of a training step, each done once.

    ``ctx``: its memory limit is ignored.
    ``say``: gets a message for each search. ``detail``: gets a message for each evaluated plan.
    """

    def __init__(
        self,
        captured: Captured | Folded,
        ctx: Context,
        passes: Sequence[Pass],
        say: Callable[[str], None] = lambda text: None,
        detail: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._captured, self._ctx, self._passes, self._say = captured, ctx, passes, say
        self._detail = detail
        self._found: dict[int, Plan] = {}

    @functools.cached_property
    def free(self) -> Plan:
        """The plan without a memory limit."""
        free = self._ctx.replace(limit_bytes=None)
        return make_plan(self._captured, free, self._passes, self._detail)

    @functools.cached_property
    def least(self) -> Prediction:
        """The prediction with the least peak: the lowest grid limit."""
        return least_limit(self._captured, self._ctx, self._passes)

    def rungs(self, limit_bytes: int) -> list[int]:
        """The grid limits to search under, ascending.

        They begin at the least feasible limit. They end at ``limit_bytes``, or at the first grid
        limit that is enough for the plan without a limit.

        Raises:
            Infeasible: ``limit_bytes`` is below the least feasible limit.
        """
        least_bytes = self.least.peak_bytes
        if limit_bytes < least_bytes:
            raise Infeasible(limit_bytes, self.least, self._ctx.world_size)
        enough_bytes = _said(self.free).peak_bytes
        found = [least_bytes]
        while found[-1] < enough_bytes and (rung := _next_rung(found[-1])) <= limit_bytes:
            found.append(rung)
        return found

    def plan(self, limit_bytes: int) -> Plan:
        """The fastest plan of all grid limits up to ``limit_bytes``; the lowest limit on a tie.

        Raises:
            Infeasible: ``limit_bytes`` is below the least feasible limit.
        """
        rungs = self.rungs(limit_bytes)
        if rungs[-1] < limit_bytes and rungs[-1] < _said(self.free).peak_bytes:
            self._say(f"{format_limit(limit_bytes)} counts as {format_limit(rungs[-1])}")
        for number, rung in enumerate(rungs, 1):
            if rung not in self._found:
                self._say(f"searching under {format_limit(rung)}, {number} of {len(rungs)}")
                ctx = self._ctx.replace(limit_bytes=rung)
                about = f"limit {number} of {len(rungs)}, "
                say = functools.partial(_after, self._detail, about)
                self._found[rung] = make_plan(self._captured, ctx, self._passes, say)
        return min((self._found[rung] for rung in rungs), key=lambda one: _said(one).step_seconds)


def _after(say: Callable[[str], None], before: str, text: str) -> None:
    say(before + text)


def _next_rung(size_bytes: int) -> int:
    """The first grid limit above a number of bytes."""
    step = max(1, (1 << (size_bytes.bit_length() - 1)) // _RUNGS)
    return (size_bytes // step + 1) * step


def _said(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction
