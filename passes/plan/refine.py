"""Refine: plans beside the fastest one that fits, which the simulator may find faster."""

from __future__ import annotations

import functools
import itertools
import math
import re

from passes.plan.evaluator import Candidate, PlanEvaluator
from passes.plan.slice_some import SLICES

#: How much slower than the fastest a plan in other slices may be to be refined too.
_NEAR_OTHER = 1.25


def refine(evaluator: PlanEvaluator, share: float = 1.0) -> None:
    """Change a group of parameters, one, or two, until no such change is faster and fits.

    Or until such a share of what may still be looked at is used up. The additive model sees
    no overlap: what hides behind what only the simulator knows.
    """
    kept = evaluator.left - math.ceil(share * evaluator.left)
    evaluator.left -= kept
    _refine(evaluator, evaluator.fastest()[0])
    evaluator.left += kept


def refine_other_slices(evaluator: PlanEvaluator, share: float) -> None:
    """The same from the fastest plan that runs other operators in slices, or none.

    With as many looks more. No single change leads from operators in slices to others: what is
    between takes too much memory, or is slower than both.
    """
    best, seconds = evaluator.fastest()
    by_names: dict[tuple[str, ...], Candidate] = {}
    for key in sorted(evaluator.fitting(), key=evaluator.seconds):
        by_names.setdefault(tuple(dict.fromkeys(one.name for one in key.splits)), key)
    others = [key for key in by_names.values() if key != best]
    if others and evaluator.seconds(others[0]) <= _NEAR_OTHER * seconds:
        left = evaluator.left
        evaluator.left = math.ceil(share * evaluator.affordable())
        _refine(evaluator, others[0])
        evaluator.left = left


def _refine(evaluator: PlanEvaluator, best: Candidate) -> None:
    """Until nothing is faster, or nothing is left of the looks."""
    single = [[own] for own in evaluator.tied]
    pairs = [[one, other] for one, other in itertools.combinations(evaluator.tied, 2)]
    groups = [[members] for members in evaluator.alike() if len(members) > 1]
    by_size = functools.partial(
        sorted, key=lambda move: sum(map(evaluator.size_bytes, move)), reverse=True
    )
    while evaluator.left > 0:
        found = _recomputing_other(evaluator, best)
        found = _slicing_other(evaluator, found)
        found = _better(evaluator, found, by_size([*groups, *single]))
        if found == best:
            found = _better(evaluator, best, by_size(pairs), together=True)
        if found == best:
            return
        best = found


def look_at_all(evaluator: PlanEvaluator) -> None:
    """Where there are few plans: all of them, with as many looks as refining had.

    First at those that recompute what the fastest does, then the others.
    """
    best, _ = evaluator.fastest()
    evaluator.left = evaluator.affordable()
    options = [[choice.decision for choice in own] for own in evaluator.tied_choices]
    keys = [best, *(best.recomputing(one) for one in (None, *evaluator.sets))]
    for key in dict.fromkeys((one.recompute, one.also_save) for one in keys):
        if math.prod(map(len, options)) > evaluator.left:
            return
        for decisions in itertools.product(*options):
            recompute, also_save = key
            tried = Candidate(evaluator.spread(decisions).decisions, recompute, also_save)
            best = _faster(evaluator, best, tried)


def _recomputing_other(evaluator: PlanEvaluator, best: Candidate) -> Candidate:
    """The same with the next smaller or larger set, or less a group of like tensors.

    Of a plan that recomputes nothing: the smallest set, where a plan with one was looked at.
    """
    if not best.recompute:
        if not any(key.recompute for key in evaluator.seen) or not evaluator.sets:
            return best
        return _faster(evaluator, best, best.recomputing(evaluator.sets[0]))
    alike: dict[str, list[str]] = {}
    for name in best.recompute:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    for group in alike.values():
        left = tuple(name for name in best.recompute if name not in group)
        best = _faster(
            evaluator, best, best._replace(recompute=left, also_save=best.also_save if left else ())
        )
    sets = [best.recomputing(one) for one in evaluator.sets]
    if best in sets:
        index = sets.index(best)
        for key in (*sets[max(0, index - 1) : index], *sets[index + 1 : index + 2]):
            best = _faster(evaluator, best, key)
    return best


def _slicing_other(evaluator: PlanEvaluator, best: Candidate) -> Candidate:
    """The same with a family in more slices or fewer, or with one more or less of them kept.

    Where plans with slices were looked at.
    """
    if not any(key.splits for key in evaluator.seen):
        return best
    for slice_group in evaluator.slice_groups:
        for slices in (1, *SLICES):
            now, kept = evaluator.slices_of(best, slice_group)
            if slices != now:
                for as_many in _as_many(kept, now, slices, slice_group.most_kept(slices)):
                    best = _faster(
                        evaluator, best, evaluator.slicing(best, slice_group, slices, as_many)
                    )
        slices, kept = evaluator.slices_of(best, slice_group)
        for one in () if kept is None else (kept - 1, kept + 1):
            if 0 <= one <= slice_group.most_kept(slices):
                best = _faster(evaluator, best, evaluator.slicing(best, slice_group, slices, one))
    return best


def _as_many(kept: int | None, now: int, slices: int, most: int) -> list[int | None]:
    """How many of other slices to keep, where so many of ``now`` are: the same share.

    Of smaller slices up to three more: one of the larger would have been too much.
    """
    if kept is None:
        return [None]
    share = kept * slices // now
    more = 3 if slices > now else 0
    return list(range(share, min(share + more, most) + 1))


def _faster(evaluator: PlanEvaluator, best: Candidate, tried: Candidate) -> Candidate:
    """The one that fits and is faster, if refining may still look at it.

    What was looked at before is again, with the buckets that the best has by now.
    """
    size_bytes = evaluator.seen[best][0].bucket_bytes
    known = size_bytes in evaluator.sizes.get(tried, ())
    if known or evaluator.left <= 0 or not evaluator.may_fit(tried.decisions):
        return best
    evaluator.left -= 1
    if tried in evaluator.seen:
        evaluator.with_buckets(tried, size_bytes)
    prediction = evaluator.evaluate(tried)
    faster = evaluator.fits(prediction) and prediction.step_seconds < evaluator.seconds(best)
    return tried if faster else best


def _better(
    evaluator: PlanEvaluator, best: Candidate, moves: list[list[list[int]]], together: bool = False
) -> Candidate:
    """The fastest plan that fits, after each of these moves in turn where it is an improvement.

    ``moves``: of each, sets of indices of parameters; those of a set get one decision, all the
    same. ``together``: all sets get others than what they have.
    """
    for move in moves:
        options = [[choice.decision for choice in evaluator.choices[own[0]]] for own in move]
        for decisions in itertools.product(*options):
            tried = list(best.decisions)
            for own, decision in zip(move, decisions, strict=True):
                for index in own:
                    tried[index] = decision
            if not (together and any(best.decisions[o[0]] is tried[o[0]] for o in move)):
                best = _faster(evaluator, best, evaluator.deciding(best, tried))
            if evaluator.left <= 0:
                return best
    return best
