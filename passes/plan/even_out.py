"""Even out: one decision for alike parameters and no slices, unless more gains enough or is needed.

A plan of the search may give one of twelve alike weights a decision of its own, or cut a small
weight into slices, for a gain that no measurement shows. People read the plan: its differences must
mean something.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from passes.candidates.candidate import Candidate
from passes.plan.constants import CONSTANTS
from passes.plan.items import Item
from passes.pricing.evaluator import Finished, PlanEvaluator
from passes.pricing.prices import Prices
from passes.types.decision import Decision


def evened(
    evaluator: PlanEvaluator,
    items: Sequence[Item],
    prices: Prices,
    best: Finished,
) -> Finished:
    """The plan with as few slices and differences between alike parameters as its time allows.

    Without slices that make the step at most ``CONSTANTS.sliced`` of itself faster. All changes of
    decisions together make it at most ``CONSTANTS.alike`` of itself slower. A plan that does not
    fit stays as it is.

    The best order costs several simulations, so a candidate that is good enough with its own is
    ordered at the end.
    """
    if not evaluator.fits(best.prediction):
        return best
    found = best
    if best.key.splits and evaluator.folded is None:  # which has slices only where it needs them
        most_seconds = (1 + CONSTANTS.sliced) * best.prediction.step_seconds
        for group in evaluator.slice_groups:
            if found.key.slices_of(group, evaluator.ctx)[0] > 1:
                whole = found.key.slicing(group, 1, None, evaluator.ctx)
                found = _good(evaluator, whole, most_seconds) or found
    most_seconds = (1 + CONSTANTS.alike) * found.prediction.step_seconds
    most_promised = (1 + CONSTANTS.least_gain) * found.prediction.step_seconds
    for item in items:
        for decisions in _plainer(item, found.key):
            key = found.key.deciding(zip(item.members, decisions, strict=True), evaluator.ctx)
            promise = prices.near(found.key).judge(key)
            if promise.above or promise.seconds > most_promised:
                continue
            plainer = _good(evaluator, key, most_seconds)
            if plainer is not None:
                found = plainer
                break
    return best if found is best else evaluator.ordered(found)


def _good(evaluator: PlanEvaluator, key: Candidate, most_seconds: float) -> Finished | None:
    """The candidate's plan if it fits and takes at most so long; else None."""

    def is_good(found: Finished) -> bool:
        in_time = found.prediction.step_seconds <= most_seconds
        return in_time and evaluator.fits(found.prediction)

    if not evaluator.fits(evaluator.evaluate(key).prediction):
        return None
    found = evaluator.lowered(key)
    if not is_good(found):
        found = evaluator.ordered(found)
    return found if is_good(found) else None


def _plainer(item: Item, key: Candidate) -> Iterator[Sequence[Decision]]:
    """Decisions for an item's parameters with fewer differences than they have, the fewest first.

    One decision for all, the most frequent one first; then one for the first parameters and another
    one for the others, as many as now.
    """
    now = [key.decisions[index] for index in item.members]
    kinds = sorted(dict.fromkeys(now), key=now.count, reverse=True)
    if len(kinds) > 1:
        yield from ([kind] * len(now) for kind in kinds)
    if len(kinds) == 2 and not item.in_layers and _changes(now) > 1:
        for first, other in (kinds, kinds[::-1]):
            yield [first] * now.count(first) + [other] * now.count(other)


def _changes(decisions: Sequence[Decision]) -> int:
    return sum(one != other for one, other in itertools.pairwise(decisions))
