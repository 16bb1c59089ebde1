"""Neighbours: the changes of a candidate, ordered by what the prices say they gain."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Iterator

from passes.candidates.candidate import Candidate
from passes.candidates.slice_groups import SliceGroup
from passes.plan.constants import CONSTANTS
from passes.plan.items import Solver, items_of, layers_of, tiny_ones
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.prices import Prices, Reference
from passes.types.decision import Decision

#: The numbers of slices to try.
SLICES = (2, 4, 8)
#: The numbers of chunks of tokens to try.
CHUNKS = (2, 4)
#: Most parameters for changes of two at once.
_MOST_PAIRED = 24

#: A name for a change of a candidate.
Change = Hashable
Moves = dict[Change, Candidate]


class Neighbourhood:
    """The neighbours of candidates of one evaluator.

    ``promising``: only changes that the prices recommend. Otherwise also others, and changes of
    two and of all decisions.
    """

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self.evaluator = evaluator
        self.prices = Prices(evaluator)
        self.promising = True
        #: Whether groups change between activations and weights.
        self.may_move = True
        self.items = items_of(evaluator)
        self._solver = Solver(self.prices.footprints, self.items)
        self._tiny, self._layer_of = tiny_ones(evaluator), layers_of(evaluator)
        #: The layers at which the decisions of a folded step may change; [0]: it is not folded.
        self._counts: list[int] = sorted(
            {count for item in self.items if item.in_layers for count in item.counts}
        ) or [0]

    @property
    def _is_easy(self) -> bool:
        """Whether forecasts hold best and evaluations take long: a folded step with memory."""
        return self.evaluator.folded is not None and not self.evaluator.is_short

    def of(self, best: Candidate, within: bool = False) -> Iterator[tuple[Change, Candidate]]:
        """The neighbours of an evaluated candidate, with the changes that lead to them.

        A turn has the next change of every kind. Moves come first, because no price covers them.
        The others follow by their forecasts.

        ``within``: keep the sliced operators and the recomputed tensors.
        """
        reference = self.prices.near(best)
        program = self._worth(reference, self._proposals(reference, best), exact=True)
        moves = [
            self._moved(reference, best) if self.may_move else [],
            self._in_chunks(best) if self.may_move else [],
        ]
        kinds = [
            program[: len(CONSTANTS.weights)] if self.promising else program,
            self._buckets(reference, best),
            self._worth(reference, self._groups(best), exact=True),
            self._worth(reference, self._singles(best), exact=True),
        ]
        if self.evaluator.is_short and not within:
            kinds.append(self._worth(reference, self._recomputed(reference, best)))
        has_limit = self.evaluator.ctx.limit_bytes is not None
        if self.evaluator.is_short or (has_limit and self.promising):
            kinds.append(self._worth(reference, self._sliced(reference, best, within)))
        rows = itertools.zip_longest(*kinds)
        for first, row in itertools.zip_longest(itertools.zip_longest(*moves), rows, fillvalue=()):
            yield from (pair for pair in first if pair is not None)
            found = [pair for pair in row if pair is not None]
            yield from sorted(found, key=lambda pair: reference.judge(pair[1]).rank)
        if not self.promising:
            yield from self._ordered(reference, self._pairs(best))
            yield from self._ordered(reference, self._all(best))

    def moving_all(self, start: Candidate, chunks: int = 1) -> Candidate:
        """The same with activations moving to all groups for which they have fewer bytes.

        ``chunks``: those in which they move where they can.
        """
        for own in self.evaluator.move_groups.by_weights:
            group = own[0]
            if group.more_bytes < 0:
                own_chunks = chunks if group.has_chunks else 1
                start = start.moving(group, True, self.evaluator.ctx, own_chunks)
        return start

    def _moved(self, reference: Reference, best: Candidate) -> list[tuple[Change, Candidate]]:
        """Other ways for move groups: activations in place of weights, and back; most gain first.

        The prices do not know what activations cost: the bytes order the changes. Compute waits
        for all tokens, and for the exposed share of weights. Groups that the user names change
        between hosts and all ranks, and keep tokens or not.
        """
        ctx = self.evaluator.ctx
        exposed = sum(reference.weights) / len(reference.weights)
        found: list[tuple[float, Change, Candidate]] = []
        for place, own in enumerate(self.evaluator.move_groups.by_weights):
            ways: dict[Decision | None, float] = {None: 2 * exposed * own[0].weight_bytes}
            ways.update({group.decision: float(group.token_bytes) for group in own})
            now = best.moves_on(own[0])
            if now is None and ctx.tensor_parallel is not True:
                continue
            changed: dict[Decision | None, Candidate] = {}
            for group in own:
                chunks = best.chunks_of(group) if group.has_chunks else 1
                changed[group.decision] = best.moving(group, True, ctx, chunks)
            if ctx.tensor_parallel is True:
                changed[None] = best.moving(own[0], False, ctx)
            for way, key in changed.items():
                if way != now:
                    more_bytes = (ways[way] - ways[now]) * len(own[0].layers)
                    found.append((more_bytes, ("move", place, way), key))
        return [(change, key) for _, change, key in sorted(found, key=lambda one: one[0])]

    def _in_chunks(self, best: Candidate) -> list[tuple[Change, Candidate]]:
        """Tokens in another number of chunks, of all groups to which they move, and of each.

        Also chunks to groups whose weights move, if tokens have fewer bytes: whole, they may be
        exposed too long.
        """
        ctx = self.evaluator.ctx
        moved = []
        for place, own in enumerate(self.evaluator.move_groups.by_weights):
            group = next((one for one in own if best.moves(one)), own[0])
            is_worth = ctx.tensor_parallel is True and group.more_bytes < 0
            if group.has_chunks and (best.moves(group) or is_worth):
                moved.append((place, group))
        found: list[tuple[Change, Candidate]] = []
        for chunks in CHUNKS if len(moved) > 1 else ():
            key = best
            for _, group in moved:
                key = key.moving(group, True, ctx, chunks)
            found.append((("chunks", chunks), key))
        moved.sort(key=lambda one: -one[1].token_bytes * len(one[1].layers))
        return found + [
            (("chunks", place, chunks), best.moving(group, True, ctx, chunks))
            for place, group in moved
            for chunks in ((*CHUNKS, 1) if best.moves(group) else CHUNKS[:1])
            if not best.moves(group) or chunks != best.chunks_of(group)
        ]

    def _proposals(self, reference: Reference, structure: Candidate) -> Moves:
        """The dynamic program's plans for a structure: at several prices and budgets."""
        limit_bytes = self.evaluator.target_bytes
        headroom = [0]
        if self.evaluator.is_short:  # collectives in flight take memory too
            largest = max(one.full_bytes for one in self.evaluator.ctx.parameters)
            headroom = [0, largest, 2 * largest]
        weights = [(one, other) for one in CONSTANTS.weights for other in CONSTANTS.weights]
        if self.evaluator.folded is not None:
            weights = [reference.weights, weights[0]]
        found: Moves = {}
        for pair, less, count in itertools.product(weights, headroom, self._counts):
            budget = None if limit_bytes is None else limit_bytes - less
            solved = self._solver.solve(reference, structure, pair, budget, count)
            if solved is not None:
                found[solved] = solved
        return found

    def _proposal(self, reference: Reference, structure: Candidate) -> list[Candidate]:
        """The dynamic program's plan for a structure at the reference's prices; empty: none."""
        solved = (
            self._solver.solve(
                reference, structure, reference.weights, self.evaluator.target_bytes, count
            )
            for count in self._counts
        )
        found = [key for key in solved if key is not None]
        return sorted(found, key=lambda key: reference.judge(key).rank)[:1]

    def program(self, key: Candidate) -> list[Candidate]:
        """The dynamic program's plan for an evaluated candidate's structure, at its own prices."""
        return self._proposal(self.prices.near(key), key)

    def saving(self, key: Candidate, most_seconds: float) -> list[Candidate]:
        """An evaluated candidate with the fastest other recompute set, by its own prices.

        Empty: none promises to fit and to be faster than this.
        """
        reference = self.prices.near(key)
        moves = self._recomputed(reference, key).items()
        fast = {c: k for c, k in moves if reference.judge_within(k, 0, most_seconds)}
        return [other for _, other in self._ordered(reference, fast)[:1]]

    def _ordered(self, reference: Reference, moves: Moves) -> list[tuple[Change, Candidate]]:
        """Changes by the forecasts of their candidates."""
        judged = [
            (reference.judge(key).rank, number, (change, key))
            for number, (change, key) in enumerate(moves.items())
            if key != reference.key
        ]
        return [pair for _, _, pair in sorted(judged, key=lambda one: one[:2])]

    def _worth(
        self, reference: Reference, moves: Moves, exact: bool = False
    ) -> list[tuple[Change, Candidate]]:
        """Changes by their forecasts, without those that promise too much memory or time.

        Folded steps take long to evaluate. Without need of memory, only changes with a gain stay.

        ``exact``: the forecast of the memory is, as of changes of decisions only.
        """
        above, seconds = self.evaluator.rank(reference.key)
        most_above = round((1 - CONSTANTS.least_gain) * above) if exact else math.inf
        is_open = above or not self.promising
        share = -CONSTANTS.promise if self._is_easy else CONSTANTS.least_gain
        most_seconds = math.inf if is_open else (1 + share) * seconds
        worth = {
            change: key
            for change, key in moves.items()
            if reference.judge_within(key, most_above, most_seconds) is not None
        }
        return self._ordered(reference, worth)

    def _groups(self, best: Candidate) -> Moves:
        """Other decisions for a group of alike parameters."""
        now = self._layer_of_change(best)
        found: Moves = {
            ("group", place, option): best.deciding(item.changes(option), self.evaluator.ctx)
            for place, item in enumerate(self.items)
            if len(item.members) > 1
            for option, count in enumerate(item.counts)
            if not (item.in_layers and now and count not in (0, now))
        }
        return found | self._other_layers(best, now) if now else found

    def _other_layers(self, best: Candidate, now: int) -> Moves:
        """The decisions of a folded step's layers change at another layer."""
        items = [item for item in self.items if item.in_layers]
        least, most = self._counts[1], self._counts[-1]
        found: Moves = {}
        for count in sorted({*self._counts[1:], now - 1, now + 1}):
            changes = [
                (index, best.decisions[item.members[0 if self._layer_of[index] < count else -1]])
                for item in items
                for index in item.members
            ]
            if least <= count <= most:
                found["layer", count] = best.deciding(changes, self.evaluator.ctx)
        return found

    def _layer_of_change(self, best: Candidate) -> int:
        """The layer of a folded step at which the decisions change; 0: they do not."""
        for item in self.items:
            own = [best.decisions[index] for index in item.members]
            if item.in_layers and own[0] != own[-1]:
                return next(place for place, one in enumerate(own) if one != own[0])
        return 0

    def _singles(self, best: Candidate) -> Moves:
        """Another decision for one parameter."""
        return {
            ("single", index, one.decision): best.deciding(
                [(index, one.decision)], self.evaluator.ctx
            )
            for index, options in enumerate(self.evaluator.choices)
            if index not in self._tiny and index not in self._layer_of
            for one in options
            if one.decision != best.decisions[index]
        }

    def _pairs(self, best: Candidate) -> Moves:
        """Other decisions for two parameters, if there are few."""
        options = [[one.decision for one in own] for own in self.evaluator.choices]
        if len(options) > _MOST_PAIRED:
            return {}
        return {
            (one, d, other, e): best.deciding([(one, d), (other, e)], self.evaluator.ctx)
            for one, other in itertools.combinations(range(len(options)), 2)
            for d in options[one]
            for e in options[other]
            if best.decisions[one] != d and best.decisions[other] != e
        }

    def _all(self, best: Candidate) -> Moves:
        """Other decisions for all parameters, if there are few."""
        options = [[one.decision for one in own] for own in self.evaluator.choices]
        if math.prod(map(len, options)) > self.evaluator.left:
            return {}
        return {
            decisions: best.deciding(enumerate(decisions), self.evaluator.ctx)
            for decisions in itertools.product(*options)
        }

    def _recomputed(self, reference: Reference, best: Candidate) -> Moves:
        """Other recompute sets, with these decisions and the best ones; without alike tensors."""
        found: Moves = {}
        for number, one in enumerate((None, *self.evaluator.sets)):
            structure = best.recomputing(one)
            if structure != best:
                found["recompute", number] = structure
                for key in self._proposal(reference, structure):
                    found["recompute", number, "program"] = key
        groups: dict[str, list[str]] = {}
        for name in best.recompute:
            groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
        for pattern, group in groups.items():
            left = tuple(name for name in best.recompute if name not in group)
            also = best.also_save if left else ()
            structure = best.replace(recompute=left, also_save=also)
            found["without", pattern] = structure
            promise = reference.judge(structure)
            if promise.above and promise.seconds < self.evaluator.seconds(best):
                for key in self._proposal(reference, structure):
                    found["without", pattern, "program"] = key
        return found

    def _sliced(self, reference: Reference, best: Candidate, within: bool) -> Moves:
        """Slice groups in other numbers of slices, and with other numbers of kept slices."""
        if self.evaluator.folded is not None:
            return self._sliced_otherwise(best, within)
        found: Moves = {}
        ctx = self.evaluator.ctx
        for place, group in enumerate(self.evaluator.slice_groups):
            now, _ = best.slices_of(group, ctx)
            saves_only = group.of_input and not self.evaluator.is_short
            if now == 1 and (within or saves_only):
                continue
            start = self._without_rivals(best, group)
            numbers = SLICES if now > 1 or self.evaluator.is_short else SLICES[-1:]
            for slices in (*reversed(numbers), *(() if within else (1,))):
                for kept in self._numbers_kept(best, group, slices):
                    key = start.slicing(group, slices, kept, ctx)
                    found["slice", place, slices, kept] = key
                    if kept is None and slices != now:
                        for proposal in self._proposal(reference, key):
                            found["slice", place, slices, "program"] = proposal
        for split in best.splits:
            left = tuple(one for one in best.splits if one.name != split.name)
            found["whole", split.name] = best.replace(splits=left)
        return found

    def _sliced_otherwise(self, best: Candidate, within: bool) -> Moves:
        """The slice groups of a folded step that are in slices in other numbers of slices."""
        ctx = self.evaluator.ctx
        return {
            ("slice", place, slices): best.slicing(group, slices, None, ctx)
            for place, group in enumerate(self.evaluator.slice_groups if best.splits else ())
            if best.slices_of(group, ctx)[0] > 1
            for slices in (*reversed(SLICES), *(() if within else (1,)))
        }

    def at_peak(self, best: Candidate) -> Iterator[Candidate]:
        """The slice groups of a folded step that have its peak, in slices.

        Slices elsewhere lower no peak. Each evaluation takes long, so the others are left out.
        """
        evaluator = self.evaluator
        for group in evaluator.slice_groups:
            is_whole = best.slices_of(group, evaluator.ctx)[0] == 1
            if is_whole and evaluator.is_at_peak(group, best):
                start = self._without_rivals(best, group)
                yield start.slicing(group, SLICES[-1], None, evaluator.ctx)

    def _without_rivals(self, best: Candidate, group: SliceGroup) -> Candidate:
        """A candidate in which other groups with a weight of this group are whole."""
        ctx = self.evaluator.ctx
        for other in self.evaluator.slice_groups:
            rivals = other is not group and other.names & group.names
            if rivals and best.slices_of(other, ctx)[0] > 1:
                best = best.slicing(other, 1, None, ctx)
        return best

    def _numbers_kept(
        self, best: Candidate, group: SliceGroup, slices: int
    ) -> Iterable[int | None]:
        """Numbers of slices to keep gathered; None: the decisions on the weights stay."""
        is_open = self.evaluator.is_short and self.evaluator.ctx.world_size > 1
        if slices == 1 or group.of_input or not is_open:
            return [None]
        fits = self.evaluator.rank(best)[0] == 0
        return [None, *range(group.most_kept(slices) + 1 if fits else 1)]

    def _buckets(self, reference: Reference, best: Candidate) -> list[tuple[Change, Candidate]]:
        """The next bucket sizes that pack differently, with these decisions and the best ones."""
        found: list[tuple[Change, Candidate]] = []
        for size in self.evaluator.other_sizes(best):
            structure = best.replace(bucket_bytes=size)
            found.append((("bucket", size), structure))
            for key in self._proposal(reference, structure):
                program: Moves = {("bucket", size, "program"): key}
                found += self._worth(reference, program) if self._is_easy else program.items()
        return found
