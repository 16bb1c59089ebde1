"""Propose: plans of the dynamic programme (``dynamic_program.py``) that are looked at first."""

from __future__ import annotations

import functools
import math

from passes.candidates.recompute_sets import RecomputeSet
from passes.capture.fold_layers import Folded
from passes.plan.dynamic_program import Table
from passes.plan.evaluator import Candidate, PlanEvaluator
from passes.types.plan import Decision

#: Of the forward's and the backward's communication.
WEIGHTS = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.3, 1.0))
#: How many plans are looked at for each weighting until one fits, and then to fit more closely.
_MOST_TRIES, _CLOSER_TRIES = 6, 2


def look_at_uniform(evaluator: PlanEvaluator) -> list[Candidate]:
    """Look at replicating all; under a limit and of a folded step also at sharding all.

    Proposals may miss that: they are as near the limit as the additive model says, and leave less
    room for overlap. There are few where there is little to decide on.

    Returns what was looked at.
    """
    limited = evaluator.ctx.limit_bytes is not None or isinstance(evaluator.captured, Folded)
    options = len(Decision) if limited else 1
    keys = [
        Candidate(tuple(o[min(option, len(o) - 1)].decision for o in evaluator.choices))
        for option in range(options)
    ]
    for key in keys:
        evaluator.evaluate(key)
    return keys


def propose_all(evaluator: PlanEvaluator) -> tuple[float, float]:
    """Look at proposals of all weightings; returns that of the fastest plan that fits.

    Of a folded step, where nothing fits by the first, not by the others: only what is recomputed
    can help then.
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
    """Look at the dynamic programme's plans for ever smaller budgets until one fits.

    Then for budgets between that one and the last that did not.

    Returns the seconds of the fastest that fits, infinity if none does.
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
        # Where a plan is just above the limit, a budget that is just smaller need not help:
        # the peak may be somewhere else than what the budget is of.
        over = prediction.peak_bytes - limit_bytes
        too_much = min(budget, table.memory_bytes(decisions))
        budget = too_much - max(over, shrink_bytes)
        shrink_bytes *= 2
    else:
        return math.inf
    seconds = prediction.step_seconds
    if isinstance(
        evaluator.captured, Folded
    ):  # few looks: ``passes/plan/mix_layers.py`` fits more closely
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
    """Where the limit takes anything from the fastest plan: plans that recompute, more or less."""
    if not evaluator.limited or not evaluator.sets:
        return

    @functools.cache
    def seconds(index: int) -> tuple[float, int]:
        found = propose(evaluator, weights, evaluator.sets[index])
        return found, -index if found == math.inf else index  # more, where nothing fits

    best, step = (len(evaluator.sets) - 1) // 2, 2
    while step:
        near = [i for i in (best, best - step, best + step) if 0 <= i < len(evaluator.sets)]
        best = min(near, key=seconds)
        step //= 2
    if isinstance(evaluator.captured, Folded):  # few looks
        return
    for other in WEIGHTS:
        if other != weights:
            propose(evaluator, other, evaluator.sets[best])
    # Peaks do not fall from set to set: one that is far from all these may fit.
    if evaluator.fitting():
        fastest, _ = evaluator.fastest()
        for one in evaluator.sets:
            evaluator.evaluate(fastest.recomputing(one))
