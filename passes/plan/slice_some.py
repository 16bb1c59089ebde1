"""Slice some: plans whose large operators run in slices, where that makes room.

In slices less of a weight, of its gradient and of what lies between two products is there at a
time. So a plan that does not fit may fit, and one that does may have more overlap. Which weights
can be sliced together is known (``passes/candidates/slice_groups.py``); in how many slices, and how
many of these are kept for the backward while the others are gathered again, only the simulator
knows.
"""

from __future__ import annotations

from passes.candidates.slice_groups import SliceGroup
from passes.plan.evaluator import Candidate, PlanEvaluator

#: In how many slices a family may run.
SLICES = (2, 4, 8)
#: How many plans that are faster than all that fit are tried in slices, with how many families.
_MOST_FASTER, _MOST_FAMILIES = 3, 3


def slice_some(evaluator: PlanEvaluator) -> None:
    """Where the limit takes anything from the fastest plan: that and others in slices."""
    if not evaluator.limited:
        return
    slice_groups = evaluator.slice_groups[:_MOST_FAMILIES]
    if not slice_groups:
        return
    fitting = evaluator.fitting()
    for key in _faster_ones(evaluator):
        for slice_group in slice_groups:
            _until_it_fits(evaluator, key, slice_group)
    if fitting:
        best, _ = evaluator.fastest()
        for slice_group in slice_groups:
            for slices in SLICES[:2]:
                evaluator.evaluate(evaluator.slicing(best, slice_group, slices))
                _keep_some(evaluator, best, slice_group, slices)


def _faster_ones(evaluator: PlanEvaluator) -> list[Candidate]:
    """The fastest of what does not fit, whose peaks slices could bring under the limit."""
    limit_bytes = evaluator.ctx.limit_bytes
    assert limit_bytes is not None
    most_bytes = (
        2 * evaluator.slice_groups[0].layer_bytes
    )  # the weights of a layer, and their gradients
    bound = evaluator.fastest()[1] if evaluator.fitting() else None
    found = [
        key
        for key, (_, prediction) in evaluator.seen.items()
        if limit_bytes < prediction.peak_bytes <= limit_bytes + most_bytes
        and (bound is None or prediction.step_seconds < bound)
    ]
    return sorted(found, key=evaluator.seconds)[:_MOST_FASTER]


def _until_it_fits(evaluator: PlanEvaluator, key: Candidate, slice_group: SliceGroup) -> None:
    """In ever more slices, with what was decided on the weights or some of the slices kept."""
    for slices in SLICES:
        prediction = evaluator.evaluate(evaluator.slicing(key, slice_group, slices))
        if evaluator.fits(prediction) or _keep_some(evaluator, key, slice_group, slices):
            return


def _keep_some(
    evaluator: PlanEvaluator, key: Candidate, slice_group: SliceGroup, slices: int
) -> bool:
    """As many slices kept as fit, the others gathered again; whether any number of them fits."""
    if slice_group.of_input or not evaluator.fits(
        evaluator.evaluate(evaluator.slicing(key, slice_group, slices, 0))
    ):
        return False
    fits, too_many = 0, slice_group.most_kept(slices) + 1
    while too_many - fits > 1:
        kept = (fits + too_many) // 2
        if evaluator.fits(evaluator.evaluate(evaluator.slicing(key, slice_group, slices, kept))):
            fits = kept
        else:
            too_many = kept
    return True
