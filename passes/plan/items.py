"""Items of the dynamic program: groups of alike parameters, and their options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from passes.candidates.candidate import Candidate
from passes.candidates.parameter_groups import alike
from passes.plan.constants import CONSTANTS
from passes.plan.dynamic_program import best_options
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.footprints import Footprints
from passes.pricing.prices import Reference
from passes.types.decision import Decision

#: Options of a group change the decision at about so many places.
_MOST_PLACES = 16
#: Most solutions until one keeps the budget at all places.
_MOST_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Item:
    """A group of alike parameters, by index, in the order of the model or of a step's layers.

    ``options``: (decision of the first parameters, decision of the others, number of the first).
    ``in_layers``: the parameters of a folded step's layers. All of them change at one layer.
    """

    members: tuple[int, ...]
    options: tuple[tuple[Decision, Decision, int], ...]
    in_layers: bool

    @functools.cached_property
    def counts(self) -> list[int]:
        """By option, the number of the first parameters; 0: all have one decision."""
        return [count for _, _, count in self.options]

    def changes(self, option: int) -> list[tuple[int, Decision]]:
        """The decisions of an option, by parameter."""
        first, others, count = self.options[option]
        return [
            (index, first if place < count else others) for place, index in enumerate(self.members)
        ]

    def sums(self, by_decision: np.ndarray) -> np.ndarray:
        """By option, the sum over the members.

        ``by_decision``: a figure for each parameter and decision.
        """
        own = np.nan_to_num(by_decision[list(self.members)])
        upto = np.vstack([np.zeros((1, own.shape[1])), np.cumsum(own, axis=0)])
        first, others, count = self._numbers
        found: np.ndarray = upto[count, first] + upto[-1, others] - upto[count, others]
        return found

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        return np.array(
            [(first.number, others.number, count) for first, others, count in self.options]
        ).T


def items_of(evaluator: PlanEvaluator) -> list[Item]:
    """The items of a step: alike parameters, and all tiny ones together.

    An item of a folded step's layers has one parameter of each layer.
    """
    tiny, layer_of = tiny_ones(evaluator), layers_of(evaluator)
    place_of = _places_in_layers(evaluator)
    groups = [[i for i in members if i not in tiny] for members in alike(evaluator.ctx.parameters)]
    found = []
    for members in [*groups, sorted(tiny)]:
        kinds: dict[tuple[tuple[Decision, ...], int | None], list[int]] = {}
        for index in members:
            decisions = tuple(one.decision for one in evaluator.choices[index])
            kinds.setdefault((decisions, place_of.get(index)), []).append(index)
        for (decisions, place), own in kinds.items():
            in_layers = place is not None
            if in_layers:
                own.sort(key=layer_of.__getitem__)
            counts = () if own[0] in tiny else _counts(evaluator, len(own), in_layers)
            options = [(one, one, 0) for one in decisions]
            options += [
                (one, other, count)
                for one in decisions
                for other in decisions
                if one != other
                for count in counts
            ]
            found.append(Item(tuple(own), tuple(options), in_layers))
    return found


def _counts(evaluator: PlanEvaluator, members: int, in_layers: bool) -> Sequence[int]:
    """Numbers of the first parameters of a group that may have a decision of their own."""
    counts = range(1, members)
    if evaluator.folded is not None:  # layers left out are like a layer at either end
        ends = evaluator.folded.inner[0]
        counts = range(ends, members - ends + 1) if in_layers else range(0)
    return counts[:: members // _MOST_PLACES + 1]


def layers_of(evaluator: PlanEvaluator) -> dict[int, int]:
    """The layer of every parameter of a folded step's layers, by index; else empty."""
    if evaluator.folded is None:
        return {}
    number = {name: n for n, names in enumerate(evaluator.folded.layers) for name in names}
    return {
        index: number[one.name]
        for index, one in enumerate(evaluator.ctx.parameters)
        if one.name in number
    }


def _places_in_layers(evaluator: PlanEvaluator) -> dict[int, int]:
    """The place of every parameter among those of its layer, by index; only of a folded step."""
    layers = () if evaluator.folded is None else evaluator.folded.layers
    place_of = {name: place for names in layers for place, name in enumerate(names)}
    return {
        index: place_of[one.name]
        for index, one in enumerate(evaluator.ctx.parameters)
        if one.name in place_of
    }


def tiny_ones(evaluator: PlanEvaluator) -> frozenset[int]:
    """The smallest parameters, which together have a small share of all bytes, by index.

    All or none of a group of alike ones. Without the parameters of a folded step's layers.
    """
    parameters, layer_of = evaluator.ctx.parameters, layers_of(evaluator)
    left_bytes = CONSTANTS.tiny * sum(one.full_bytes for one in parameters)
    found: list[int] = []
    for members in sorted(alike(parameters), key=lambda own: parameters[own[0]].full_bytes):
        left_bytes -= sum(parameters[index].full_bytes for index in members)
        if left_bytes < 0:
            break
        found += [index for index in members if index not in layer_of]
    return frozenset(found) if len(found) > 1 else frozenset()


class Solver:
    """Solves for the decisions at the prices of a reference."""

    def __init__(self, footprints: Footprints, items: Sequence[Item]) -> None:
        self._footprints, self._items = footprints, items
        self._seconds = [
            [item.sums(footprints.seconds_of[:, :, kind]) for kind in range(3)] for item in items
        ]
        self._bytes: dict[tuple[object, ...], list[np.ndarray]] = {}

    def solve(
        self,
        reference: Reference,
        structure: Candidate,
        weights: tuple[float, float],
        limit_bytes: int | None,
        count: int,
    ) -> Candidate | None:
        """The best decisions for a structure; None: none fit.

        The budget binds at the place of the peak. If the solution has its peak at another place,
        the mean over these places binds, and so on.

        ``structure``: recomputation, slices and bucket size; its decisions do not count.
        ``weights``: prices of a second of communication in the forward and in the backward.
        ``count``: the layer at which the decisions of a folded step's layers may change.
        """
        forward, backward = weights
        values = [f * forward + b * backward + c for f, b, c in self._seconds]
        allowed = [
            np.flatnonzero([not item.in_layers or own in (0, count) for own in item.counts])
            for item in self._items
        ]
        values = [own[options] for own, options in zip(values, allowed, strict=True)]
        if limit_bytes is None or reference.fixed is None:
            return self._candidate(structure, allowed, best_options(values, values, None) or [])
        unchosen = reference.unchosen(structure)
        places = [int(np.argmax(unchosen))]
        best: Candidate | None = None
        least_bytes, less_bytes = np.inf, 0
        for _ in range(_MOST_ROUNDS):
            tables = [self._bytes_at(place, structure) for place in places]
            own = [
                np.mean([table[j][options] for table in tables], axis=0)
                for j, options in enumerate(allowed)
            ]
            budget = limit_bytes - less_bytes - int(np.mean(unchosen[places]))
            picks = best_options(values, own, budget)
            if picks is None:
                break
            found = self._candidate(structure, allowed, picks)
            bytes_at = unchosen + self._footprints.bytes_of(found)
            peak = int(np.argmax(bytes_at))
            if bytes_at[peak] < least_bytes:
                best, least_bytes = found, bytes_at[peak]
            if bytes_at[peak] <= limit_bytes:
                return found
            if peak in places:
                less_bytes += int(bytes_at[peak] - limit_bytes)
            else:
                places.append(peak)
        return best

    def _bytes_at(self, place: int, structure: Candidate) -> list[np.ndarray]:
        """By item and option, the bytes at a place."""
        key = place, structure.splits, structure.recompute, structure.also_save
        if key not in self._bytes:
            table = self._footprints.bytes_at(place, structure)
            self._bytes[key] = [item.sums(table) for item in self._items]
        return self._bytes[key]

    def _candidate(
        self, structure: Candidate, allowed: Sequence[np.ndarray], picks: Sequence[int]
    ) -> Candidate:
        """The candidate with a picked one of the allowed options of every item."""
        changes = [
            change
            for item, options, pick in zip(self._items, allowed, picks, strict=True)
            for change in item.changes(int(options[pick]))
        ]
        return structure.deciding(changes, self._footprints.ctx)
