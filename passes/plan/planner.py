"""The planner: what to shard and what to recompute, so that the step is fastest under the limit.

The problem. For every parameter i choose d(i) in {replicate, shard and keep, shard and
gather again}, on a mesh of two levels over all ranks or within each host, and a set R of saved
activations that the backward computes again, to minimise the
step's seconds subject to peak bytes <= limit. Both are what the simulator says of the schedule
that the passes emit; neither is a sum over parameters.

The method, in two levels:

1. *Dynamic programming over memory* on an additive model (``passes/plan/dynamic_program.py``), for
   several weights of the forward's and the backward's communication: hidden communication costs
   nothing, so a plan may move bytes from the backward, where an all-reduce lies wholly, into the
   forward.
2. *The simulator decides.* For each weighting the budget v is lowered by what the simulated
   peak exceeds the limit by, and by ever more, until the plan fits. The fastest simulated plan
   that fits is then refined: one group of like parameters, or one parameter, at a time; at last
   the size of its buckets is.

What runs in slices (``passes/plan/slice_some.py``) is tried on the fastest plan that fits, and on
faster ones that do not.

R is empty where the fastest plan fits with all the overlap that it could have. Otherwise a few
sets, from a little to as much as helps (``passes/candidates/recompute_sets.py``), are each given
the first level's best plans, the middle one first and then towards where the step is faster.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from passes.capture.captured_step import Captured
from passes.capture.fold_layers import Folded
from passes.pipeline import Pass
from passes.plan.bucket_sizes import SIZED_PLANS, share_sizes, size_buckets, size_buckets_of_sets
from passes.plan.evaluator import PlanEvaluator
from passes.plan.explain import explained
from passes.plan.least_memory import least_memory
from passes.plan.mix_layers import mix_layers
from passes.plan.orders import orders, with_fastest_order
from passes.plan.predict import predict
from passes.plan.propose import look_at_uniform, propose_all, recompute_some
from passes.plan.refine import look_at_all, refine, refine_other_slices
from passes.plan.slice_some import slice_some
from passes.types.context import Context
from passes.types.plan import Plan, Prediction
from passes.types.units import format_bytes, format_limit, is_decimal

#: What share of the looks that refining has it may take before buckets have their sizes.
_REFINED_FIRST = 2 / 3
#: How many of the fastest plans get the order of collectives that is best for them.
_ORDERED = 3


class Infeasible(ValueError):
    """No plan fits; ``least_bytes`` is the smallest limit that would."""

    def __init__(self, limit_bytes: int, least: Prediction, world_size: int) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = least.peak_bytes
        decimal = is_decimal(limit_bytes)  # all sizes in the family of units that the limit is in
        filling = ", ".join(
            f"{kind} {format_bytes(size, decimal)}" for kind, size in least.peak.items()
        )
        least_text = format_bytes(self.least_bytes, decimal, round_up=True)
        super().__init__(
            f"memory_limit={format_limit(limit_bytes)} is below the least possible "
            f"{least_text} for this model on {world_size} ranks ({filling}). "
            "Raise it, use a smaller batch, or run on more ranks."
        )


def make_plan(
    captured: Captured | Folded,
    ctx: Context,
    passes: Sequence[Pass],
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The fastest plan under ``ctx.limit_bytes`` (None: no limit). See the module's docstring.

    ``captured``: or folded; then the plan leaves the order of the collectives open.
    ``say``: is told how many plans were priced, of up to how many.

    Raises:
        Infeasible: if even the plan that takes the least memory is above the limit.
    """
    with _young_garbage_only():
        return _searched(captured, ctx, passes, say)


def least_limit(captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]) -> Prediction:
    """What takes the least memory that is found: its peak is the least limit that works.

    It does not depend on ``ctx.limit_bytes``.
    """
    with _young_garbage_only():
        return least_memory(PlanEvaluator(captured, ctx.replace(limit_bytes=0), passes))


def _searched(
    captured: Captured | Folded,
    ctx: Context,
    passes: Sequence[Pass],
    say: Callable[[str], None],
) -> Plan:
    evaluator = PlanEvaluator(captured, ctx, passes, say)
    uniform = look_at_uniform(evaluator)
    recompute_some(evaluator, propose_all(evaluator))
    slice_some(evaluator)
    if ctx.limit_bytes is not None and not evaluator.feasible(1):
        least = least_memory(evaluator)
        if least.peak_bytes > ctx.limit_bytes:
            raise Infeasible(ctx.limit_bytes, least, ctx.world_size)
    size_buckets_of_sets(evaluator)
    size_buckets(evaluator, 1)
    if isinstance(captured, Folded):  # a large model: few looks
        refine(evaluator)
        mix_layers(evaluator)
    else:
        refine_other_slices(evaluator, _REFINED_FIRST)
        refine(evaluator, _REFINED_FIRST)
        best = None
        while best != (best := evaluator.fastest()):
            size_buckets(evaluator, SIZED_PLANS)
            share_sizes(evaluator)
            refine(evaluator)  # from the plan that is the fastest with the buckets it now has
        look_at_all(evaluator)
        share_sizes(evaluator)
    found = evaluator.feasible()
    if isinstance(captured, Folded):
        plan = explained(*found[0], ctx, captured.stand_ins(found[0][0]))
        return plan.replace(order={})  # of a few layers only
    # Everything gathered again leaves the most room, which its first order may not use.
    known = [plan for plan, _ in found[:_ORDERED]]
    others = [
        (evaluator.seen[key][0], evaluator.lowered(key))
        for key in evaluator.fitting()
        if key in uniform
    ]
    others = [
        pair for pair in others if pair[0] not in known and evaluator.fits(pair[1].prediction)
    ]
    found = [*found[:_ORDERED], *others]
    ordered = [with_fastest_order(*pair, captured, ctx, passes) for pair in found]
    fastest = min(ordered, key=lambda pair: pair[1].prediction.step_seconds)
    return explained(*fastest, ctx, {})


@contextmanager
def _young_garbage_only() -> Iterator[None]:
    """Collect no garbage but what :func:`_collect` is called for.

    A graph is a cycle, so that garbage must be collected; but looking through all of torch's
    objects for it, again and again, takes a third of the planner's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def complete(plan: Plan, captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]) -> Plan:
    """A plan made by hand with what it leaves open: the order of its collectives, a prediction.

    What it decides is not changed, and the limit not asked for. Of a folded step the order is left
    open.
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
