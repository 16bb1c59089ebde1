"""Monotone search: one that is never slower with more memory, for it searches under less of it too.

One search (``passes/plan/planner.py``) follows its own way under every limit, and with more memory
the way may end at a slower plan. So here a limit is not searched under by itself: fixed limits up
to it are, the *rungs*, and the fastest of their plans counts; what lies above the highest of them
is not used. Whoever has more memory has the same rungs
and perhaps further ones. The price is as many searches as there are rungs: for plans that are made
once, before a long training.

A plan stays one for its own rung: with more room its collectives would be scheduled otherwise than
was predicted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from passes.capture.captured_step import Captured
from passes.capture.fold_layers import Folded
from passes.pipeline import Pass
from passes.plan.planner import Infeasible, least_limit, make_plan
from passes.types.context import Context
from passes.types.plan import Plan, Prediction
from passes.types.units import format_limit

#: So many rungs are between a number of bytes and its double, evenly spaced: round numbers, such
#: as people give (8, 24, 46 or 80 GiB), are rungs.
_RUNGS = 32


class MonotoneSearch:
    """The rungs of a training step, each searched under once.

    ``ctx``: its limit does not count. ``say``: is told what is searched under. ``detail``: is told
    of every plan that is priced.
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
        """The plan without a limit."""
        free = self._ctx.replace(limit_bytes=None)
        return make_plan(self._captured, free, self._passes, self._detail)

    @functools.cached_property
    def least(self) -> Prediction:
        """What takes the least memory that is found: the lowest rung."""
        return least_limit(self._captured, self._ctx, self._passes)

    def rungs(self, limit_bytes: int) -> list[int]:
        """The limits that are searched under, ascending.

        From the least that is feasible up to the limit, and to the first with which nothing is
        short of memory.

        Raises:
            Infeasible: if the limit is below the least.
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
        """The fastest plan of all rungs up to the limit; of equals the one with the lowest.

        Raises:
            Infeasible: if the limit is below the least.
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
    """The first rung above a number of bytes, which need not be one."""
    step = max(1, (1 << (size_bytes.bit_length() - 1)) // _RUNGS)
    return (size_bytes // step + 1) * step


def _said(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction
