"""Refine: local search around the fastest plan that fits, with the simulator as judge."""

from __future__ import annotations

import functools
import itertools
import math
import re

from passes.plan.evaluator import Candidate, PlanEvaluator
from passes.plan.slice_some import SLICES

#: Refine a plan with other slices if its step is at most this many times the fastest step.
_NEAR_OTHER = 1.25


def refine(evaluator: PlanEvaluator, share: float = 1.0) -> None:
    """Change a parameter group, one parameter, or two, until no change that fits is faster.

    The additive model does not see overlap; only the simulator does.

    ``share``: stop after this share of the remaining evaluation budget.
    """
    kept = evaluator.left - math.ceil(share * evaluator.left)
    evaluator.left -= kept
    _refine(evaluator, evaluator.fastest()[0])
    evaluator.left += kept


def refine_other_slices(evaluator: PlanEvaluator, share: float) -> None:
    """Refine the fastest plan with other sliced operators, or with none, if it is fast enough.

    No single change leads from one set of sliced operators to another: the plans in between take
    too much memory, or are slower than both.

    ``share``: the additional evaluation budget, as a share of the full one.
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
    """Refine until no change is faster, or the evaluation budget is used up."""
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
    """Evaluate all plans if there are few, with a new evaluation budget.

    Plans with the recompute set of the fastest plan come first.
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
    """Try the next smaller and larger recompute set, and the set without a group of like tensors.

    For a plan without recomputation, try the smallest set if any evaluated plan recomputes.
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
    """Try each slice group in other numbers of slices, and with one kept slice more or less.

    Only if any evaluated plan has slices.
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
    """Numbers of slices to keep when a group changes from ``now`` to ``slices`` slices.

    The first keeps the same share of the weight. With smaller slices, up to three more are tried:
    one more of the larger slices could be too much. ``most``: the upper bound.
    """
    if kept is None:
        return [None]
    share = kept * slices // now
    more = 3 if slices > now else 0
    return list(range(share, min(share + more, most) + 1))


def _faster(evaluator: PlanEvaluator, best: Candidate, tried: Candidate) -> Candidate:
    """The faster of two candidates; ``tried`` counts only if it fits and the budget allows it.

    A candidate that is already evaluated is evaluated again with the bucket size of ``best``.
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
    """Apply each move in turn if the result fits and is faster.

    ``moves``: each move is a list of groups of parameter indices. All parameters of a group get
    the same decision. ``together``: every group of a move must get a new decision.
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
