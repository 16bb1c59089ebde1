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
    search = _Search(evaluator)
    # If a parameter can be sharded both within hosts and over all ranks, the former usually takes
    # more memory: try it last.
    flat = [
        [one for one in options if not (one.decision.within_host and len(options) > 3)]
        for options in evaluator.choices
    ]
    best = search.best_start(flat)
    best = search.descended(best, flat)
    if flat != evaluator.choices:
        best = search.descended(best, evaluator.choices)
    without = best
    best = search.recomputed_or_sliced(without)
    if best is not without:
        best = search.descended(best, evaluator.choices)
    chosen = search.with_smaller_buckets(best)
    evaluator.seen[best] = chosen
    evaluator.sizes[best] = set()  # no size was evaluated on a schedule with overlap
    return chosen[1]


class _Search:
    """The candidates of one search, each priced once on a schedule without overlap.

    ``bucket_bytes``: the bucket size of these prices.
    """

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self.evaluator = evaluator
        self.ctx = evaluator.ctx.replace(limit_bytes=0)
        self.bucket_bytes = bucket_bytes_for(self.ctx)
        is_folded = isinstance(evaluator.captured, Folded)
        self.most_evaluations = _FOLDED_LOOKS if is_folded else _MOST_LOOKS
        self.known: dict[Candidate, tuple[Plan, Prediction]] = {}

    def priced(self, key: Candidate, bucket_bytes: int) -> tuple[Plan, Prediction]:
        """The plan of a candidate and its prediction."""
        plan, _ = self.evaluator.price(key, self.ctx, bucket_bytes)
        lowered = predict(self.evaluator.captured, plan, self.ctx, self.evaluator.passes)
        return plan, lowered.prediction

    def peak(self, key: Candidate) -> int:
        """The peak of a candidate in bytes."""
        if key not in self.known:
            self.known[key] = self.priced(key, self.bucket_bytes)
        return self.known[key][1].peak_bytes

    def fits(self, key: Candidate) -> bool:
        """Whether a priced candidate is within the user's limit."""
        return self.evaluator.fits(self.known[key][1])

    def best_start(self, choices: list[list[Choice]]) -> Candidate:
        """The start with the least peak; sets the bucket size."""
        starts = [
            Candidate(tuple(options[min(place, len(options) - 1)].decision for options in choices))
            for place in (2, 1, 0)
        ]
        best = min(starts, key=self.peak)
        if self.fits(best):
            return best
        # If all weights of a step fit into one bucket, smaller buckets decide which start is best.
        # An equal peak counts too: buckets may decide later, once the present cause of the peak is
        # gone.
        smaller = [(self.bucket_bytes // factor, key) for factor in (4, 16) for key in starts]
        found = {one: self.priced(one[1], one[0]) for one in smaller if one[0]}
        least = min(found, key=lambda one: (found[one][1].peak_bytes, one[0]))
        if found[least][1].peak_bytes <= self.peak(best):
            self.bucket_bytes, best = least
            self.known = {best: found[least]}
        return best

    def descended(self, best: Candidate, choices: list[list[Choice]]) -> Candidate:
        """Coordinate descent over the decisions of parameter groups."""
        most, improved = len(self.known) + self.most_evaluations, True
        while improved and len(self.known) < most and not self.fits(best):
            improved = False
            for members in self.evaluator.alike():
                for option in choices[members[0]]:
                    decisions = list(best.decisions)
                    for index in members:
                        decisions[index] = option.decision
                    tried = self.evaluator.deciding(best, decisions)
                    if len(self.known) < most and self.peak(tried) < self.peak(best):
                        best, improved = tried, True
                        if self.fits(best):
                            break
        return best

    def recomputed_or_sliced(self, without: Candidate) -> Candidate:
        """The best candidate with recompute sets, and with operators in slices."""
        best, starting = without, [without]
        for one in [] if self.fits(best) else self.evaluator.lean_sets:
            starting.append(without.recomputing(one))
            best = min(best, starting[-1], key=self.peak)
            if self.fits(best):
                break
        for start in sorted(starting, key=self.peak)[:_MOST_STARTS]:
            if not self.fits(best):
                best = min(best, self.sliced(start), key=self.peak)
        return best

    def sliced(self, best: Candidate) -> Candidate:
        """Greedy slicing: the slice group that saves most memory, then the next one, and so on."""
        improved = True
        while improved and not self.fits(best):
            before = best
            for slice_group in self.evaluator.slice_groups:
                tried = self.evaluator.slicing(before, slice_group, SLICES[-1], 0)
                best = min(best, tried, key=self.peak)
                if self.fits(best):
                    break
            improved = best != before
        return best

    def with_smaller_buckets(self, best: Candidate) -> tuple[Plan, Prediction]:
        """The plan of a candidate with the bucket size of the least peak."""
        chosen, misses = self.known[best], 0
        size_bytes = self.bucket_bytes // 4
        while size_bytes >= LEAST_BUCKET_BYTES and misses < BUCKET_MISSES:
            if self.evaluator.fits(chosen[1]):
                break
            tried = self.priced(best, size_bytes)
            misses += 1
            if tried[1].peak_bytes < chosen[1].peak_bytes:
                chosen, misses = tried, 0
            size_bytes //= 4
        return chosen
