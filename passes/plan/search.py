"""The search: one hill climb over one neighbourhood (``neighbours.py``).

The module's docstring of ``planner.py`` has the problem, the recurrence, the prices and the
stopping rule.
"""

from __future__ import annotations

from collections.abc import Iterable

from passes.candidates.candidate import Candidate
from passes.plan.constants import CONSTANTS
from passes.plan.neighbours import CHUNKS, Change, Neighbourhood
from passes.pricing.evaluator import FINER, PlanEvaluator, above_target
from passes.types.decision import DECISIONS


class Search:
    """A search for the fastest candidate of an evaluator, or for the one with the least memory.

    ``enough_bytes``: a search for the least memory ends with a candidate of this peak.
    """

    def __init__(self, evaluator: PlanEvaluator, enough_bytes: int = 0) -> None:
        self.evaluator, self._enough_bytes = evaluator, enough_bytes
        evaluator.left = _budget(evaluator)
        self.neighbours = Neighbourhood(evaluator)
        #: Changes that gained nothing, with the structure that they were tried on.
        self._useless: set[tuple[object, ...]] = set()

    def fastest(self) -> Candidate:
        """The fastest candidate within the limit; if none is found, the one nearest to it."""
        evaluator = self.evaluator
        limited = evaluator.ctx.limit_bytes is not None
        decides_moves = evaluator.ctx.tensor_parallel is True and evaluator.move_groups.groups
        self.neighbours.may_move = not decides_moves
        evaluator.left = _budget(evaluator, self.neighbours.may_move)
        folded = evaluator.folded is not None
        number, left = len(DECISIONS) if limited or folded else 1, evaluator.left
        keys = [evaluator.uniform(option) for option in range(number)]
        for key in keys:
            evaluator.evaluate(key)
        if folded:  # whose small budget is for the climb
            evaluator.left = left
        evaluator.is_short = limited and evaluator.is_limited(min(keys, key=evaluator.seconds))
        if all(evaluator.rank(key)[0] for key in keys):
            keys += self._lean_enough(min(keys, key=evaluator.rank))
        start = self._in_other_buckets(min(keys, key=evaluator.rank))
        best = self._onwards(start)
        return self._moving(best) if decides_moves else best

    def _in_other_buckets(self, best: Candidate) -> Candidate:
        """For a folded step: the candidate with larger buckets, as long as these are faster.

        If they are not, with smaller ones. Of a thousand ranks, latency is most of a small
        collective; of a few ranks, smaller buckets overlap more. They do not count for the
        evaluation budget, which would not reach far enough.
        """
        if self.evaluator.folded is None:
            return best
        left = self.evaluator.left
        found = self._in_buckets_along(best, 1)
        if found == best:
            found = self._in_buckets_along(best, -1)
        self.evaluator.left = left
        return found

    def _in_buckets_along(self, best: Candidate, sign: int) -> Candidate:
        """The candidate with larger (1) or smaller (-1) buckets, as long as these are faster."""
        evaluator = self.evaluator
        while True:
            sizes = evaluator.other_sizes(best)
            size = next((one for one in sizes if sign * one > sign * best.bucket_bytes), None)
            if size is None:
                return best
            key = best.replace(bucket_bytes=size)
            if evaluator.evaluated_rank(key) >= evaluator.rank(best):
                return best
            best = key

    def _moving(self, best: Candidate) -> Candidate:
        """The best candidate that climbs with moves lead to, from one without; with a new budget.

        Also from all moves that send fewer bytes, whole and in chunks.
        """
        evaluator = self.evaluator
        self.neighbours.may_move = True
        evaluator.left = _budget(evaluator)
        starts = [self.neighbours.moving_all(best, chunks) for chunks in (1, CHUNKS[0])]
        return self._onwards(min([best, *starts], key=evaluator.evaluated_rank))

    def least(self) -> Candidate:
        """The candidate with the least peak, or the first one that is low enough.

        It climbs to a peak a little below the best one, again and again.
        """
        evaluator = self.evaluator
        keys = [evaluator.uniform(option) for option in range(len(DECISIONS))]
        best = min([*keys, *self._lean()], key=evaluator.peak_bytes)
        best = min(best, self._in_slices(self._emptiest(best)), key=evaluator.peak_bytes)
        best = self._between_sets(best)
        while not self._is_enough(best) and evaluator.left > 0:
            lower = 1 - CONSTANTS.least_gain
            evaluator.target_bytes = round(lower * evaluator.peak_bytes(best))
            self._climb(best)
            reached = min(evaluator.seen, key=evaluator.peak_bytes)
            if evaluator.peak_bytes(reached) == evaluator.peak_bytes(best):
                break
            best = reached
        return best

    def _emptiest(self, best: Candidate) -> Candidate:
        """The evaluated candidate about as low as the best one that holds least at other places."""
        evaluator = self.evaluator
        most_bytes = (1 + CONSTANTS.least_gain) * evaluator.peak_bytes(best)
        found = [key for key in evaluator.seen if evaluator.peak_bytes(key) <= most_bytes]
        return min(found, key=lambda key: above_target(evaluator.seen[key].bytes_at, 0))

    def start_again(self, key: Candidate) -> Candidate:
        """The best candidate that climbs from another start lead to, with a new budget."""
        self.evaluator.left = _budget(self.evaluator)
        self.evaluator.evaluate(key)
        return self._onwards(key)

    def _onwards(self, best: Candidate) -> Candidate:
        """The best candidate that climbs from here lead to.

        The first climbs follow the prices, the last ones look at all changes. A folded step, whose
        evaluations take long, has the first ones only, and one more with slices if nothing fits.
        """
        folded = self.evaluator.folded is not None
        for self.neighbours.promising in (True,) if folded else (True, False):
            best = self._reached(best)
        self.neighbours.promising = True
        sliced = self._in_slices(best) if self.evaluator.rank(best)[0] else best
        return best if sliced == best else min(best, self._reached(sliced), key=self.evaluator.rank)

    def _reached(self, best: Candidate) -> Candidate:
        """The best candidate that one climb leads to, and those from other structures."""
        best = self._climb(best)
        if self.evaluator.rank(best)[0] == 0:
            best = self._other_structures(best)
        return best

    def _in_slices(self, best: Candidate) -> Candidate:
        """For a folded step: the candidate with the operators at its peak in slices.

        Then those at the new peak, as long as the peak gets lower. Half of the evaluation budget is
        for the climb from there.
        """
        evaluator = self.evaluator
        if evaluator.folded is None or not evaluator.is_short or self._is_enough(best):
            return best
        found: Candidate | None = best
        while found is not None:
            best = found
            most_bytes = (1 - CONSTANTS.least_gain) * evaluator.peak_bytes(best)
            lower = (
                k for k in self.neighbours.at_peak(best) if evaluator.peak_bytes(k) <= most_bytes
            )
            found = next(lower, None)
            if found is not None:
                evaluator.left = max(evaluator.left, CONSTANTS.folded_plans // 2)
        return best

    def _lean(self) -> list[Candidate]:
        """Candidates with little memory: all weights regathered, with each recompute set."""
        start = self.evaluator.uniform(len(DECISIONS) - 1)  # each parameter's last choice
        start = start.replace(bucket_bytes=start.bucket_bytes // 4)
        return [start.recomputing(one) for one in (None, *self.evaluator.sets)]

    def _between_sets(self, best: Candidate) -> Candidate:
        """The lowest of a candidate and of some with recompute sets near to its own.

        Each round looks half as far from the lowest one.
        """
        evaluator = self.evaluator
        sets = evaluator.fine_sets
        own = [place for place, one in enumerate(evaluator.sets) if best.recomputing(one) == best]
        if not own:
            return best
        held_bytes = evaluator.sets[own[0]].held_bytes
        place = sum(one.held_bytes > held_bytes for one in sets)
        step = FINER // 2
        while step and evaluator.left > 0:
            for other in sorted({place - step, place + step} & {*range(len(sets))}):
                key = best.recomputing(sets[other])
                evaluator.evaluate(key)
                if evaluator.peak_bytes(key) < evaluator.peak_bytes(best):
                    best, place = key, other
            step //= 2
        return best

    def _lean_enough(self, reference: Candidate) -> list[Candidate]:
        """Candidates with little memory, evaluated in the order of their promise up to one that
        fits.

        ``reference``: an evaluated candidate.
        """
        judge = self.neighbours.prices.near(reference).judge
        evaluated = []
        for key in sorted(self._lean(), key=lambda one: judge(one).rank):
            self.evaluator.evaluate(key)
            evaluated.append(key)
            if self.evaluator.rank(key)[0] == 0:
                break
        return evaluated

    def _climb(self, best: Candidate, within: bool = False) -> Candidate:
        """Go to a better neighbour, as long as there is one and the budget lasts.

        ``within``: keep the structure.
        """
        evaluator = self.evaluator
        while evaluator.left > 0 and not self._is_enough(best) and not evaluator.is_reached(best):
            tried: list[Candidate] = []
            found = self._step(best, self.neighbours.of(best, within), within, tried)
            if found is None and not self.neighbours.promising and not within:
                found = self._second_step(best, tried)
            if found is None:
                break
            best = found
        return best

    def _step(
        self,
        best: Candidate,
        moves: Iterable[tuple[Change, Candidate]],
        known: bool,
        tried: list[Candidate],
    ) -> Candidate | None:
        """The first neighbour that is better, or None.

        ``known``: evaluated candidates count too. ``tried``: gets the neighbours.
        """
        evaluator = self.evaluator
        for change, key in moves:
            if evaluator.left <= 0:
                return None
            where = _structure(best), change
            if self.neighbours.promising and where in self._useless:
                continue
            tried.append(key)
            if key in evaluator.seen and not known:
                continue
            evaluator.evaluate(key)
            if self._gains(key, best):
                return key
            found = self.followed(key, best)
            if found is not None:
                return found
            self._useless.add(where)
        return None

    def followed(self, key: Candidate, best: Candidate) -> Candidate | None:
        """A better candidate than the best one, by one more change of ``key``; or None.

        If that is faster but above the limit: to the dynamic program's decisions at its own prices.
        If it fits in other slices, which may make room only: to another recompute set.
        """
        evaluator, most_seconds = self.evaluator, self.evaluator.seconds(best)
        fits = evaluator.rank(key)[0] == 0
        others: list[Candidate] = []
        if evaluator.rank(best)[0]:
            return None
        if evaluator.seconds(key) < most_seconds:
            others = self.neighbours.program(key)
        elif _structure(key)[1] != _structure(best)[1] and evaluator.is_short and fits:
            others = self.neighbours.saving(key, most_seconds)
        for other in others:
            evaluator.evaluate(other)
            if self._gains(other, best):
                return other
        return None

    def _second_step(self, best: Candidate, tried: Iterable[Candidate]) -> Candidate | None:
        """A better candidate that is two changes away, or None.

        The first change is one that was tried and lost least.
        """
        evaluator = self.evaluator
        evaluated = dict.fromkeys(key for key in tried if key in evaluator.seen)
        firsts = sorted(evaluated, key=evaluator.rank)  # ties in the order of the trials
        for key in firsts[: CONSTANTS.width]:
            reference = self.neighbours.prices.near(key)
            moves = (
                (change, other)
                for change, other in self.neighbours.of(key)
                if reference.judge(other).rank < evaluator.rank(best)
            )
            found = self._step(best, moves, False, [])
            if found is not None:
                return found
        return None

    def _other_structures(self, best: Candidate) -> Candidate:
        """Climb from the best candidates with other slices or recomputed tensors."""
        evaluator = self.evaluator
        done = {_structure(best)}
        while evaluator.left > 0 and not self._is_enough(best):
            above, seconds = evaluator.rank(best)
            bound = above, CONSTANTS.near * seconds
            found = [
                key
                for key in evaluator.seen
                if _structure(key) not in done and evaluator.rank(key) <= bound
            ]
            if not found:
                return best
            start = min(found, key=evaluator.rank)
            done.add(_structure(start))
            reached = self._climb(start, within=True)
            if evaluator.rank(reached) < evaluator.rank(best):
                best = self._climb(reached)
                done.add(_structure(best))
        return best

    def _gains(self, key: Candidate, best: Candidate) -> bool:
        """Whether a candidate is better by enough to go on from there."""
        above, seconds = self.evaluator.rank(key)
        best_above, best_seconds = self.evaluator.rank(best)
        if best_above:
            return above < (1 - CONSTANTS.least_gain) * best_above
        return above == 0 and seconds < best_seconds

    def _is_enough(self, key: Candidate) -> bool:
        return self.evaluator.peak_bytes(key) <= self._enough_bytes


def _budget(evaluator: PlanEvaluator, moves: bool = True) -> int:
    """The evaluation budget: smaller for a large graph, which takes long to simulate.

    ``moves``: groups change between activations and weights.
    """
    if evaluator.folded is not None:
        groups = evaluator.move_groups.groups if moves else ()
        chunks = len(CHUNKS) * sum(one.has_chunks for one in groups)
        return CONSTANTS.folded_plans + 2 * len(groups) + chunks
    nodes = sum(map(len, evaluator.place_of))
    plans = max(CONSTANTS.least_plans, CONSTANTS.most_nodes // nodes)
    return min(CONSTANTS.most_plans, plans)


def _structure(key: Candidate) -> tuple[object, ...]:
    """The recomputed tensors, the sliced weights, and those that stay."""
    return key.recompute, tuple(one.name for one in key.splits), key.stays
