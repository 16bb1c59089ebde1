"""Slice some: evaluate plans with large operators in slices, to save memory.

With slices, only a part of a weight, of its gradient and of the tensor between two products is
alive at a time. So a plan may fit that does not fit otherwise, or may have more overlap. The slice
groups are known (``passes/candidates/slice_groups.py``). The simulator decides on the number of
slices, and on the number that is kept for the backward while the others are regathered.
"""

from __future__ import annotations

from passes.candidates.slice_groups import SliceGroup
from passes.plan.evaluator import Candidate, PlanEvaluator

#: The numbers of slices to try.
SLICES = (2, 4, 8)
#: Number of plans to try in slices that are faster than all plans that fit, and number of groups.
_MOST_FASTER, _MOST_FAMILIES = 3, 3


def slice_some(evaluator: PlanEvaluator) -> None:
    """Evaluate plans in slices, if the memory limit restricts the fastest plan."""
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
    """The fastest plans that do not fit, with peaks that slices could bring under the limit."""
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
    """Try ever more slices until a plan fits: with the same decisions, or with some slices kept."""
    for slices in SLICES:
        prediction = evaluator.evaluate(evaluator.slicing(key, slice_group, slices))
        if evaluator.fits(prediction) or _keep_some(evaluator, key, slice_group, slices):
            return


def _keep_some(
    evaluator: PlanEvaluator, key: Candidate, slice_group: SliceGroup, slices: int
) -> bool:
    """Search for the most kept slices that fit; the others are regathered.

    Returns whether any number of kept slices fits.
    """
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
