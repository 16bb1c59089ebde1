"""The planner: find the decisions with the fastest step under the memory limit.

The problem. For every parameter i choose d(i) in {replicate, shard and keep gathered, shard and
regather}, on a two-level mesh over all ranks or within each host, and a set R of saved activations
that the backward recomputes. Minimise the step's seconds subject to peak bytes <= limit. The
simulator gives both values for the schedule that the passes emit. Neither is a sum over
parameters.

The method has two levels:

1. *Dynamic programming over memory* on an additive model (``passes/plan/dynamic_program.py``), for
   several weights of the forward's and the backward's communication. Hidden communication costs
   nothing, so a plan may move bytes from the backward, which contains all all-reduces, to the
   forward.
2. *The simulator decides.* For each weighting, the budget v is lowered by the simulated peak's
   excess over the limit, and by growing steps, until the plan fits. Then the fastest simulated
   plan that fits is refined: its bucket size, and its decisions for one parameter group, or for one
   or two parameters, at a time.

Slices (``passes/plan/slice_some.py``) are tried on the fastest plan that fits, and on faster plans
that do not fit.

R is empty if the fastest plan fits with all its overlap. Otherwise the first level makes plans for
some recompute sets (``passes/candidates/recompute_sets.py``): for the middle one, and then for its
neighbours in the direction of the faster step.
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

#: Share of the evaluation budget that refinement may use before the search for bucket sizes.
_REFINED_FIRST = 2 / 3
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

    ``captured``: for a folded step, the plan leaves the order of the collectives open.
    ``say``: gets a message with the number of evaluated plans and its upper bound.

    Raises:
        Infeasible: even the plan with the least memory is above the limit.
    """
    with _young_garbage_only():
        return _searched(captured, ctx, passes, say)


def least_limit(captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]) -> Prediction:
    """The prediction of the plan with the least memory. Its peak is the least feasible limit.

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
    evaluator = size_buckets(evaluator, 1)
    if isinstance(captured, Folded):  # a large model: small evaluation budget
        refine(evaluator)
        mix_layers(evaluator)
    else:
        refine_other_slices(evaluator, _REFINED_FIRST)
        refine(evaluator, _REFINED_FIRST)
        best = None
        while best != (best := evaluator.fastest()):
            evaluator = size_buckets(evaluator, SIZED_PLANS)
            share_sizes(evaluator)
            refine(evaluator)  # from the fastest plan with its new bucket size
        look_at_all(evaluator)
        share_sizes(evaluator)
    found = evaluator.feasible()
    if isinstance(captured, Folded):
        plan = explained(*found[0], ctx, captured.representatives(found[0][0]))
        return plan.replace(order={})  # the order covers a few layers only
    # Uniform plans too: regathering everything leaves the most headroom, which the first order
    # may not use.
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
    """Turn automatic garbage collection off; the evaluator collects the youngest objects only.

    Graphs are reference cycles, so they need garbage collection. But automatic collections search
    all objects of torch again and again, which takes much time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
