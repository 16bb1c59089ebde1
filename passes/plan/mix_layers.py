"""Mix layers: give the equal layers of a folded step two different sets of decisions."""

from __future__ import annotations

import itertools
import math

from passes.capture.fold_layers import Folded
from passes.plan.evaluator import Candidate, PlanEvaluator

#: Number of pairs of plans to mix, and number of tries per order of a pair until one fits.
_MOST_MIXED, _MIXED_TRIES = 3, 4


def mix_layers(evaluator: PlanEvaluator) -> None:
    """Mix a fast plan that does not fit and a plan that fits, over the layers of a folded step.

    The first layers get the fast plan and the others the plan that fits, or the other way round.
    Linear interpolation between the two peaks gives the number of layers with the fast plan. The
    most promising pairs are evaluated.
    """
    limit_bytes = evaluator.ctx.limit_bytes
    if not isinstance(evaluator.captured, Folded) or limit_bytes is None:
        return
    layers = len(evaluator.captured.layers)
    layer_of = {n: i for i, names in enumerate(evaluator.captured.layers) for n in names}
    number = [layer_of.get(parameter.name) for parameter in evaluator.ctx.parameters]
    fast = [
        key for key, (_, prediction) in evaluator.seen.items() if not evaluator.fits(prediction)
    ]
    fits = evaluator.fitting()
    promises: list[tuple[float, int, Candidate, Candidate]] = []
    for one, other in itertools.product(fast, fits):
        if (one.recompute, one.also_save) != (other.recompute, other.also_save):
            continue  # both plans must recompute the same tensors
        over, under = evaluator.seen[one][1], evaluator.seen[other][1]
        share = (limit_bytes - under.peak_bytes) / (over.peak_bytes - under.peak_bytes)
        count = int(share * layers)
        seconds = under.step_seconds + share * (over.step_seconds - under.step_seconds)
        if count:
            promises.append((seconds, count, one, other))
    promises.sort(key=lambda promise: promise[:2])
    best = min(map(evaluator.seconds, fits), default=math.inf)
    for seconds, most, one, other in promises[:_MOST_MIXED]:
        if seconds >= best:
            return
        for first, last in ((one, other), (other, one)):
            count = most
            for _ in range(_MIXED_TRIES):
                split = count if first is one else layers - count
                mixed = tuple(
                    kept if place is None else early if place < split else late
                    for place, kept, early, late in zip(
                        number, other.decisions, first.decisions, last.decisions, strict=True
                    )
                )
                prediction = evaluator.evaluate(other._replace(decisions=mixed))
                if evaluator.fits(prediction):
                    best = min(best, prediction.step_seconds)
                    break
                count -= max(1, count // 16)
