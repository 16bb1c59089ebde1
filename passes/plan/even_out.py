"""Even out: give alike parameters one decision, unless a difference gains enough or is needed.

A plan of the search may give one of twelve alike weights a decision of its own, for a gain that no
measurement shows. People read the plan: its differences must mean something.
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
    """The plan with as few differences between alike parameters as the step's time allows.

    All changes together make the step at most ``CONSTANTS.alike`` of itself slower. A plan that
    does not fit stays as it is.

    The best order costs several simulations, so a candidate that is good enough with its own is
    ordered at the end.
    """
    before = best
    most_seconds = (1 + CONSTANTS.alike) * best.prediction.step_seconds

    def good(found: Finished) -> bool:
        in_time = found.prediction.step_seconds <= most_seconds
        return in_time and evaluator.fits(found.prediction)

    if not evaluator.fits(best.prediction):
        return best
    for item in items:
        for decisions in _plainer(item, best.key):
            key = best.key.deciding(zip(item.members, decisions, strict=True), evaluator.ctx)
            promise = prices.near(best.key).judge(key)
            if promise.above or promise.seconds > CONSTANTS.slower * best.prediction.step_seconds:
                continue
            if not evaluator.fits(evaluator.evaluate(key).prediction):
                continue
            found = evaluator.lowered(key)
            if not good(found):
                found = evaluator.ordered(found)
            if good(found):
                best = found
                break
    return best if best is before else evaluator.ordered(best)


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
