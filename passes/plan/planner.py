"""The planner: find the decisions with the fastest step under the memory limit.

The problem. A candidate x has a decision d(i) for every parameter i (replicate; shard and keep
gathered; shard and regather; on a two-level mesh the same within each host), a set of saved tensors
that the backward recomputes, slice groups with their numbers of slices, groups whose weights stay
while activations move, and a bucket size.
Minimise T(x), the step's seconds, subject to max over p of M(x, p) <= L: the bytes at every place p
of the step, and the limit. The simulator gives T and M for the schedule that the passes emit.
Neither is a sum over parameters.

The recurrence (``dynamic_program.py``). An item j is a group of alike parameters (``items.py``). An
option o gives its first k members one decision and the others another one::

    f[j][v] = min over o of f[j-1][v - w(j, o)] + c(j, o)
    c(j, o) = wf * forward communication + wb * backward communication + computing
    w(j, o) = bytes at the place where M binds

The prices (``passes/pricing/prices.py``) come from the simulation of a candidate x and judge
candidates near it. wf and wb are the exposed shares of x's communication. The place where M binds
is that of the peak; if the solution has its peak at another place, both bind.

The search (``search.py``). Start from uniform plans; if none fits, also from plans that recompute.
Evaluate the neighbours (``neighbours.py``) of the best candidate x in the order of their promise at
x's prices: the dynamic program's solutions, other decisions for a group or one parameter, bucket
sizes, recompute sets and slices, the last two with the dynamic program's decisions for them too. Go
to the first one that is better, with its prices. If one is faster but above L, the dynamic
program's solution at its own prices is next. The objective is (bytes above L summed over all
places, T).

The search stops if no neighbour is better, also from the best candidates with other slices and
recomputed tensors and after two changes, or if the evaluation budget is used up. The budget follows
from the size of the graph, not from time. If nothing fits, the same climb with L = 0 finds the
least memory, and the search goes on from the first candidate that fits.

At last, alike parameters get one decision where that costs next to nothing (``even_out.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from passes.candidates.candidate import Candidate
from passes.capture.fold_layers import Folded
from passes.graph.captured import Captured
from passes.pipeline import Pass
from passes.plan.constants import CONSTANTS
from passes.plan.even_out import evened
from passes.plan.search import Search
from passes.pricing.evaluator import Finished, PlanEvaluator, varied, young_garbage_only
from passes.pricing.orders import orders, with_fastest_order
from passes.pricing.predict import predict
from passes.reasons.explain import explained
from passes.reasons.gains import gains, gains_of_moves, gains_of_slices
from passes.types.context import Context
from passes.types.plan import Plan, Prediction
from passes.types.units import format_bytes, format_limit, format_ranks, is_decimal

#: Number of the fastest plans to predict as they will run, which changes their time a little.
_LOWERED = 8
#: Number of the fastest plans for which to search a better order of collectives.
_ORDERED = 3


class Infeasible(ValueError):
    """No plan fits the memory limit. ``least_bytes``: the least feasible limit."""

    def __init__(self, limit_bytes: int, least: Prediction, world_size: int) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = least.peak_bytes
        decimal = is_decimal(limit_bytes)  # the message has all sizes in the limit's kind of unit
        filling = ", ".join(
            f"{kind} {format_bytes(size, decimal)}" for kind, size in least.peak.items()
        )
        least_text = format_bytes(self.least_bytes, decimal, round_up=True)
        super().__init__(
            f"memory_limit={format_limit(limit_bytes)} is below the least possible "
            f"{least_text} for this model on {format_ranks(world_size)} ({filling}). "
            "Raise it, use a smaller batch, or run on more ranks."
        )


def make_plan(
    captured: Captured | Folded,
    ctx: Context,
    passes: Sequence[Pass],
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The fastest plan under ``ctx.limit_bytes`` (None: no limit). See the module's docstring.

    ``captured``: for a folded step, the plan leaves the order of the collectives open.
    ``say``: gets a message with the number of evaluated plans and its upper bound.

    Raises:
        Infeasible: even the plan with the least memory is above the limit.
    """
    with young_garbage_only():
        return _searched(captured, ctx, passes, say)


def least_limit(captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]) -> Prediction:
    """The prediction of the plan with the least memory. Its peak is the least feasible limit.

    It does not depend on ``ctx.limit_bytes``.
    """
    with young_garbage_only():
        return _least(captured, ctx, passes)[-1]


def _searched(
    captured: Captured | Folded,
    ctx: Context,
    passes: Sequence[Pass],
    say: Callable[[str], None],
) -> Plan:
    evaluator = PlanEvaluator(captured, ctx, passes, say)
    search = Search(evaluator)
    search.fastest()
    most = 1 if isinstance(captured, Folded) else _LOWERED
    found = list(itertools.islice(_lowered(evaluator, evaluator.fitting(_ORDERED)), most))
    if ctx.limit_bytes is not None and not found:
        key, plan, least = _least(captured, ctx, passes, enough_bytes=ctx.limit_bytes)
        if least.peak_bytes > ctx.limit_bytes:
            raise Infeasible(ctx.limit_bytes, least, ctx.world_size)
        search.start_again(key)
        found = list(itertools.islice(_lowered(evaluator, evaluator.fitting(_ORDERED)), most))
        if not found:
            found = [Finished(key, plan, predict(captured, plan, ctx, passes))]
    best = _best_ordered(evaluator, found)
    prices = search.neighbours.prices
    best = evened(evaluator, search.neighbours.items, prices, best)
    representatives: dict[str, str] = {}
    if isinstance(captured, Folded):
        representatives = captured.representatives(best.plan)
        best = best._replace(plan=best.plan.replace(order={}))  # it covers a few layers only
    said = (
        gains(evaluator, prices.near(best.key)),
        gains_of_slices(evaluator, best.key),
        gains_of_moves(evaluator, best.key),
    )
    return explained(best.plan, best.step, ctx, representatives, *said)


def _best_ordered(evaluator: PlanEvaluator, found: list[Finished]) -> Finished:
    """The fastest plan with its best order; a folded step leaves the order open.

    An order may gain more with other slices, and about as much for plans that are nearly equal.
    """
    if evaluator.folded is not None:
        return found[0]
    found = varied(found, 1 + CONSTANTS.least_gain)[:_ORDERED]
    if evaluator.is_short:
        # Regathering everything leaves the most headroom, which the first order may not use.
        uniform = [key for key in evaluator.fitting() if len({*key.decisions}) == 1]
        found += _lowered(evaluator, uniform)
    return min(map(evaluator.ordered, found), key=_step_seconds)


def _lowered(evaluator: PlanEvaluator, keys: Iterable[Candidate]) -> Iterator[Finished]:
    """The plans that still fit when they are lowered with their own order."""
    for key in keys:
        found = evaluator.lowered(key)
        if evaluator.fits(found.prediction):
            yield found


def _step_seconds(found: Finished) -> float:
    return found.prediction.step_seconds


def _least(
    captured: Captured | Folded, ctx: Context, passes: Sequence[Pass], enough_bytes: int = 0
) -> tuple[Candidate, Plan, Prediction]:
    """The candidate with the least memory, or the first one that takes little enough.

    Its plan has an order without overlap.
    """
    evaluator = PlanEvaluator(captured, ctx.replace(limit_bytes=0), passes)
    best = Search(evaluator, enough_bytes).least()
    plan = evaluator.seen[best].plan.replace(memory_limit_bytes=ctx.limit_bytes)
    return best, plan, evaluator.lowered(best).prediction


def complete(plan: Plan, captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]) -> Plan:
    """Complete a plan made by hand: add the order of its collectives, and a prediction.

    The decisions do not change, and the plan may exceed the memory limit. For a folded step the
    order stays open.
    """
    if isinstance(captured, Folded):
        step = predict(captured, plan, ctx.replace(deciding=True), passes)
        return plan.replace(prediction=step.prediction)
    if plan.order:
        return plan.replace(prediction=predict(captured, plan, ctx, passes).prediction)
    found = predict(captured, plan, ctx.replace(deciding=True), passes)
    plan = plan.replace(order=orders(found))
    step = predict(captured, plan, ctx, passes)
    plan, step = with_fastest_order(plan, step, captured, ctx, passes)
    return plan.replace(prediction=step.prediction)
