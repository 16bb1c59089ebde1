"""Least memory: search for the smallest memory limit with a plan."""

from __future__ import annotations

from passes.capture.fold_layers import Folded
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.bucket_sizes import BUCKET_MISSES
from passes.plan.dynamic_program import Choice
from passes.plan.evaluator import LEAST_BUCKET_BYTES, Candidate, PlanEvaluator
from passes.plan.predict import predict
from passes.plan.slice_some import SLICES
from passes.types.plan import Plan, Prediction

#: Evaluation budget of a descent; the second is for a folded step, which takes long to simulate.
_MOST_LOOKS, _FOLDED_LOOKS = 48, 12
#: Number of plans with the least memory to try in slices.
_MOST_STARTS = 2


def least_memory(evaluator: PlanEvaluator) -> Prediction:
    """The prediction with the least peak, or the first one on the way that fits.

    To regather everything does not always take the least memory: a second gather may be in flight
    at the peak. The search uses schedules without overlap:

    1. coordinate descent over the decisions of parameter groups;
    2. recompute sets;
    3. operators in slices;
    4. another descent, if a set or slices help;
    5. smaller buckets, while they take less memory.

    The path does not depend on the limit, so the least limit in an error message works.
    """
    ctx = evaluator.ctx.replace(limit_bytes=0)
    # If a parameter can be sharded both within hosts and over all ranks, the former usually takes
    # more memory: try it last.
    flat = [
        [one for one in options if not (one.decision.within_host and len(options) > 3)]
        for options in evaluator.choices
    ]
    starts = [
        Candidate(tuple(options[min(place, len(options) - 1)].decision for options in flat))
        for place in (2, 1, 0)
    ]
    size_bytes = bucket_bytes_for(ctx)
    most_looks = _FOLDED_LOOKS if isinstance(evaluator.captured, Folded) else _MOST_LOOKS
    known: dict[Candidate, tuple[Plan, Prediction]] = {}

    def priced(key: Candidate, bucket_bytes: int) -> tuple[Plan, Prediction]:
        plan, _ = evaluator.price(key, ctx, bucket_bytes)
        return plan, predict(evaluator.captured, plan, ctx, evaluator.passes).prediction

    def peak(key: Candidate) -> int:
        if key not in known:
            known[key] = priced(key, size_bytes)
        return known[key][1].peak_bytes

    def descended(best: Candidate, choices: list[list[Choice]]) -> Candidate:
        most, improved = len(known) + most_looks, True
        while improved and len(known) < most and not evaluator.fits(known[best][1]):
            improved = False
            for members in evaluator.alike():
                for option in choices[members[0]]:
                    decisions = list(best.decisions)
                    for index in members:
                        decisions[index] = option.decision
                    tried = evaluator.deciding(best, decisions)
                    if len(known) < most and peak(tried) < peak(best):
                        best, improved = tried, True
                        if evaluator.fits(known[best][1]):
                            break
        return best

    def sliced(best: Candidate) -> Candidate:
        """Greedy slicing: the slice group that saves most memory, then the next one, and so on."""
        improved = True
        while improved and not evaluator.fits(known[best][1]):
            before = best
            for slice_group in evaluator.slice_groups:
                best = min(best, evaluator.slicing(before, slice_group, SLICES[-1], 0), key=peak)
                if evaluator.fits(known[best][1]):
                    break
            improved = best != before
        return best

    # If all weights of a step fit into one bucket, smaller buckets decide which start is best. An
    # equal peak counts too: buckets may decide later, once the present cause of the peak is gone.
    best = min(starts, key=peak)
    if not evaluator.fits(known[best][1]):
        smaller = [(size_bytes // factor, key) for factor in (4, 16) for key in starts]
        found = {one: priced(one[1], one[0]) for one in smaller if one[0]}
        least = min(found, key=lambda one: (found[one][1].peak_bytes, one[0]))
        if found[least][1].peak_bytes <= peak(best):
            size_bytes, best = least
            known = {best: found[least]}
    best = descended(best, flat)
    if flat != evaluator.choices:
        best = descended(best, evaluator.choices)
    without, starting = best, [best]
    for one in [] if evaluator.fits(known[best][1]) else evaluator.lean_sets:
        starting.append(without.recomputing(one))
        best = min(best, starting[-1], key=peak)
        if evaluator.fits(known[best][1]):
            break
    for start in sorted(starting, key=peak)[:_MOST_STARTS]:
        if not evaluator.fits(known[best][1]):
            best = min(best, sliced(start), key=peak)
    if best is not without:
        best = descended(best, evaluator.choices)
    chosen, misses = known[best], 0
    size_bytes //= 4
    while size_bytes >= LEAST_BUCKET_BYTES and misses < BUCKET_MISSES:
        if evaluator.fits(chosen[1]):
            break
        tried = priced(best, size_bytes)
        misses += 1
        if tried[1].peak_bytes < chosen[1].peak_bytes:
            chosen, misses = tried, 0
        size_bytes //= 4
    evaluator.seen[best] = chosen
    evaluator.sizes[best] = set()  # no size was evaluated on a schedule with overlap
    return chosen[1]
