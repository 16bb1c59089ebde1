"""Slice some: plans whose large operators run in slices, where that makes room.

In slices less of a weight, of its gradient and of what lies between two products is there at a
time. So a plan that does not fit may fit, and one that does may have more overlap. Which weights
can be sliced together is known (``passes/candidates/slice_groups.py``); in how many slices, and how
many of these are kept for the backward while the others are gathered again, only the simulator
knows.
"""

from __future__ import annotations

from passes.candidates.slice_groups import Family
from passes.plan.evaluator import Key, Looks

#: In how many slices a family may run.
SLICES = (2, 4, 8)
#: How many plans that are faster than all that fit are tried in slices, with how many families.
_MOST_FASTER, _MOST_FAMILIES = 3, 3


def slice_some(looks: Looks) -> None:
    """Where the limit takes anything from the fastest plan: that and others in slices."""
    if not looks.limited:
        return
    families = looks.families[:_MOST_FAMILIES]
    if not families:
        return
    fitting = looks.fitting()
    for key in _faster_ones(looks):
        for family in families:
            _until_it_fits(looks, key, family)
    if fitting:
        best, _ = looks.fastest()
        for family in families:
            for slices in SLICES[:2]:
                looks.look(looks.slicing(best, family, slices))
                _keep_some(looks, best, family, slices)


def _faster_ones(looks: Looks) -> list[Key]:
    """The fastest of what does not fit, whose peaks slices could bring under the limit."""
    limit_bytes = looks.ctx.limit_bytes
    assert limit_bytes is not None
    most_bytes = 2 * looks.families[0].layer_bytes  # the weights of a layer, and their gradients
    bound = looks.fastest()[1] if looks.fitting() else None
    found = [
        key
        for key, (_, said) in looks.seen.items()
        if limit_bytes < said.peak_bytes <= limit_bytes + most_bytes
        and (bound is None or said.step_seconds < bound)
    ]
    return sorted(found, key=looks.seconds)[:_MOST_FASTER]


def _until_it_fits(looks: Looks, key: Key, family: Family) -> None:
    """In ever more slices, with what was decided on the weights or some of the slices kept."""
    for slices in SLICES:
        said = looks.look(looks.slicing(key, family, slices))
        if looks.fits(said) or _keep_some(looks, key, family, slices):
            return


def _keep_some(looks: Looks, key: Key, family: Family, slices: int) -> bool:
    """As many slices kept as fit, the others gathered again; whether any number of them fits."""
    if family.of_input or not looks.fits(looks.look(looks.slicing(key, family, slices, 0))):
        return False
    fits, too_many = 0, family.most_kept(slices) + 1
    while too_many - fits > 1:
        kept = (fits + too_many) // 2
        if looks.fits(looks.look(looks.slicing(key, family, slices, kept))):
            fits = kept
        else:
            too_many = kept
    return True
