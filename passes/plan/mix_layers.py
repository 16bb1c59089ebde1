"""Mix layers: of a folded step, whose layers are alike, some decided on one way, some another."""

from __future__ import annotations

import itertools
import math

from passes.capture.fold_layers import Folded
from passes.plan.evaluator import Candidate, PlanEvaluator

#: How many pairs of plans are mixed over the layers of a folded step, and tried how often to fit.
_MOST_MIXED, _MIXED_TRIES = 3, 4


def mix_layers(evaluator: PlanEvaluator) -> None:
    """Of a folded step, whose layers were all decided on alike: one plan for some layers.

    The first ones get a plan that is faster and does not fit, the others one that does, or the
    other way round; as many as do fit, by a straight line between the two. The pairs that
    promise most are looked at.
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
            continue  # what is recomputed is, in all layers
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
