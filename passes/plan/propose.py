"""Propose: the first plans to evaluate, from the dynamic program (``dynamic_program.py``)."""

from __future__ import annotations

import functools
import math

from passes.candidates.recompute_sets import RecomputeSet
from passes.capture.fold_layers import Folded
from passes.plan.dynamic_program import Table
from passes.plan.evaluator import Candidate, PlanEvaluator
from passes.types.decision import DECISIONS

#: Weights of the forward's and the backward's communication: pairs (wf, wb).
WEIGHTS = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.3, 1.0))
#: Evaluation budget per weighting until a plan fits, and then to get closer to the limit.
_MOST_TRIES, _CLOSER_TRIES = 6, 2


def look_at_uniform(evaluator: PlanEvaluator) -> list[Candidate]:
    """Evaluate uniform plans: replicate all; with a limit or a folded step also shard all.

    Proposals may miss these plans: in the additive model they are close to the limit, and so leave
    less headroom for overlap. With few parameters there are few proposals.

    Returns the evaluated candidates.
    """
    limited = evaluator.ctx.limit_bytes is not None or isinstance(evaluator.captured, Folded)
    options = len(DECISIONS) if limited else 1
    keys = [
        Candidate(tuple(o[min(option, len(o) - 1)].decision for o in evaluator.choices))
        for option in range(options)
    ]
    for key in keys:
        evaluator.evaluate(key)
    return keys


def propose_all(evaluator: PlanEvaluator) -> tuple[float, float]:
    """Evaluate the proposals of all weightings. Returns the weights of the fastest plan that fits.

    For a folded step, stop if nothing fits with the first weighting: only recomputation can help.
    """
    seconds: dict[tuple[float, float], float] = {}
    for weights in WEIGHTS:
        seconds[weights] = propose(evaluator, weights)
        if isinstance(evaluator.captured, Folded) and seconds[weights] == math.inf:
            break
    return min(seconds, key=seconds.__getitem__)


def propose(
    evaluator: PlanEvaluator, weights: tuple[float, float], one: RecomputeSet | None = None
) -> float:
    """Evaluate the dynamic program's plans for ever smaller memory budgets until one fits.

    Then evaluate plans for budgets between this one and the last one that is too large. A folded
    step leaves that to ``passes/plan/mix_layers.py``.

    ``one``: the recompute set of the plans, or None.

    Returns the seconds per step of the fastest plan that fits; infinity if none fits.
    """
    table = Table(evaluator.tied_choices, weights, evaluator.ctx)
    limit_bytes = evaluator.ctx.limit_bytes
    bounds = (table.most_bytes, limit_bytes, evaluator.budgets.get(one))
    budget = min(bound for bound in bounds if bound is not None)
    too_much, shrink_bytes, known = budget, table.unit_bytes, len(evaluator.seen)
    while len(evaluator.seen) < known + _MOST_TRIES:
        decisions = table.best(budget)
        if decisions is None:
            return math.inf
        prediction = evaluator.evaluate(evaluator.spread(decisions).recomputing(one))
        if limit_bytes is None or evaluator.fits(prediction):
            break
        # A slightly smaller budget need not help a plan slightly above the limit: the budgeted
        # bytes may not be the cause of the peak.
        over = prediction.peak_bytes - limit_bytes
        too_much = min(budget, table.memory_bytes(decisions))
        budget = too_much - max(over, shrink_bytes)
        shrink_bytes *= 2
    else:
        return math.inf
    seconds = prediction.step_seconds
    if isinstance(
        evaluator.captured, Folded
    ):  # small evaluation budget: ``passes/plan/mix_layers.py`` gets closer to the limit
        evaluator.budgets[one] = budget
        return seconds
    for _ in range(_CLOSER_TRIES if limit_bytes is not None else 0):
        between = (budget + too_much) // 2
        decisions = table.best(between)
        if decisions is not None:
            prediction = evaluator.evaluate(evaluator.spread(decisions).recomputing(one))
        if decisions is not None and evaluator.fits(prediction):
            budget = between
            seconds = min(seconds, prediction.step_seconds)
        else:
            too_much = between
    return seconds


def recompute_some(evaluator: PlanEvaluator, weights: tuple[float, float]) -> None:
    """Evaluate plans with recompute sets, if the memory limit restricts the fastest plan."""
    if not evaluator.limited or not evaluator.sets:
        return

    @functools.cache
    def seconds(index: int) -> tuple[float, int]:
        found = propose(evaluator, weights, evaluator.sets[index])
        return found, -index if found == math.inf else index  # prefer larger sets if none fits

    best, step = (len(evaluator.sets) - 1) // 2, 2
    while step:
        near = [i for i in (best, best - step, best + step) if 0 <= i < len(evaluator.sets)]
        best = min(near, key=seconds)
        step //= 2
    if isinstance(evaluator.captured, Folded):  # small evaluation budget
        return
    for other in WEIGHTS:
        if other != weights:
            propose(evaluator, other, evaluator.sets[best])
    # Peaks need not fall from set to set: a set far from the best one may fit.
    if evaluator.fitting():
        fastest, _ = evaluator.fastest()
        for one in evaluator.sets:
            evaluator.evaluate(fastest.recomputing(one))
