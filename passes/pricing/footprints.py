"""Footprints: the bytes and the collectives of every decision, by place in the captured step.

Places are the nodes of the captured forward, of the captured backward, and at last the optimizer's
step. Parameter i with decision d takes m(i, d, p) bytes at place p:

* its local state between steps;
* its gathered copy, from the first use in the forward to the last one in the backward if it is
  kept, or within each graph if it is regathered; the backward also uses it where it recomputes
  from it;
* the copies that other calls in flight keep, in both graphs;
* its gradient, whole where it is made, and local from there on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from passes.annotate.training_state import StepBytes
from passes.candidates.candidate import Candidate
from passes.capture.fold_layers import Folded
from passes.graph.op_traits import effective_users
from passes.ops.markers import REDUCE_GRAD, reduce_grad_of, unshard_of, unshards
from passes.pricing.evaluator import PlanEvaluator
from passes.types.decision import DECISIONS, Decision
from passes.types.plan import OF_INPUT, Split

#: The most intervals and overlaps of a parameter.
_MOST_INTERVALS, _MOST_OVERLAPS = 7, 3


class Interval(NamedTuple):
    """Bytes that are alive from the first place to the last one."""

    first: int
    last: int
    size_bytes: int


class Overlap(NamedTuple):
    """A collective that can overlap compute.

    ``place``: of the first use of a gathered weight, or of the gradient. ``kind``: 0: a gather in
    the forward, 1: a gather in the backward, 2: a reduction. ``size_bytes``: more bytes alive while
    it is in flight.
    """

    place: int
    kind: int
    size_bytes: int
    seconds: float


class Lifetime(NamedTuple):
    """The places of one parameter's uses; None: there are none.

    ``left_out``: the parameter's layer is left out of a folded step; its places are at the gap.
    """

    forward: tuple[int, int] | None
    backward: tuple[int, int] | None
    gradient: int | None
    left_out: bool = False


class Footprints:
    """The bytes and seconds of all decisions of a step's parameters.

    ``seconds_of``: by parameter and decision, seconds of communication in the forward, in the
    backward, and of computing; NaN: the decision is impossible.
    """

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self._evaluator, self.ctx = evaluator, evaluator.ctx
        self.places = sum(map(len, evaluator.place_of)) + 1
        self._lifetimes = _lifetimes(evaluator)
        self._ranks = [
            self.ctx.cut(one).ranks if self.ctx.mesh_dims or not one.within_host else 1
            for one in DECISIONS
        ]
        self._gap, self._stands_for = 0, dict[str, str]()
        if evaluator.folded is not None:
            self._gap = evaluator.folded.gap[1]
            self._stands_for = _likes(evaluator.folded)
        self._parameters = np.arange(len(evaluator.choices))
        self.seconds_of = np.full((len(evaluator.choices), len(DECISIONS), 3), np.nan)
        for index, options in enumerate(evaluator.choices):
            by_decision = {one.decision: one for one in options}
            for decision, one in by_decision.items():
                if decision.regathers and self._lifetimes[index].backward is None:
                    # The backward does not gather it.
                    one = by_decision.get(Decision(decision.scope, keep=True), one)
                self.seconds_of[index, decision.number] = (
                    one.forward_seconds,
                    one.backward_seconds,
                    one.compute_seconds,
                )
        #: The parameters whose collectives are in the graphs, by index.
        self.inside = [n for n, life in enumerate(self._lifetimes) if not life.left_out]
        #: By parameter and decision, bytes of the local shard of a trained parameter.
        self._shards = np.array(
            [
                [p.shard_bytes(ranks) if p.requires_grad else 0 for ranks in self._ranks]
                for p in self.ctx.parameters
            ]
        )
        self._trained = np.flatnonzero([p.requires_grad for p in self.ctx.parameters])
        self._step_bytes = StepBytes(self.ctx)
        self._tables: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._known: dict[tuple[int, ...], tuple[object, tuple[np.ndarray, np.ndarray]]] = {}
        #: By table of intervals, the numbers of the last decisions and their bytes by place.
        self._last: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _tables_of(self, key: Candidate) -> tuple[np.ndarray, np.ndarray]:
        """By parameter and decision, the intervals and the overlaps, as columns of numbers.

        Rows of zeros fill up. A column of bytes is the third one of both.
        """
        structure = key.splits, key.recompute, key.also_save
        # Candidates share these tuples, which may have thousands of names: their ids are hashed.
        ids = tuple(map(id, structure))
        if ids in self._known:
            return self._known[ids][1]
        if structure not in self._tables:
            if key.recompute:
                whole = key.replace(recompute=(), also_save=())
                intervals, overlaps = (table.copy() for table in self._tables_of(whole))
                lifetimes = self._lifetimes_with(key)
            else:
                shape = len(self.ctx.parameters), len(DECISIONS)
                intervals = np.zeros((3, *shape, _MOST_INTERVALS), dtype=np.int64)
                overlaps = np.zeros((4, *shape, _MOST_OVERLAPS))
                lifetimes = dict(enumerate(self._lifetimes))
            self._fill(intervals, overlaps, lifetimes, key.splits)
            self._tables[structure] = intervals, overlaps
        self._known[ids] = structure, self._tables[structure]  # holds them, so that ids stay valid
        return self._tables[structure]

    def _lifetimes_with(self, key: Candidate) -> dict[int, Lifetime]:
        """By index, the lifetimes of the parameters that a candidate's recomputation reads."""
        found: dict[int, Lifetime] = {}
        reads = self._evaluator.recomputation.reads(key.recompute, key.also_save)
        offset = len(self._evaluator.place_of[0])
        for index, parameter in enumerate(self.ctx.parameters):
            life = self._lifetimes[index]
            own = reads.get(self._stands_for.get(parameter.name, parameter.name))
            if own is None:
                continue
            uses = [place + offset for place in own]
            if life.left_out:
                uses = [self._gap + offset] * 2
            if life.backward is not None:
                uses += life.backward
            if (changed := life._replace(backward=(min(uses), max(uses)))) != life:
                found[index] = changed
        return found

    def _fill(
        self,
        intervals: np.ndarray,
        overlaps: np.ndarray,
        lifetimes: Mapping[int, Lifetime],
        splits: tuple[Split, ...],
    ) -> None:
        """Write the rows of the parameters with these lifetimes, by index."""
        by_name = {one.name: one for one in splits}
        inside = set(self.inside)
        for decision in DECISIONS:
            if decision.within_host and self.ctx.mesh_dims is None:
                continue
            number = decision.number
            for index, life in lifetimes.items():
                split = by_name.get(self.ctx.parameters[index].name)
                intervals[:, index, number] = 0
                for place, one in enumerate(self._intervals(index, life, decision, split)):
                    intervals[:, index, number, place] = one
                if index not in inside or np.isnan(self.seconds_of[index, number, 0]):
                    continue
                overlaps[:, index, number] = 0
                for place, overlap in enumerate(self._overlaps(index, life, decision, split)):
                    overlaps[:, index, number, place] = overlap

    def _intervals(
        self, index: int, life: Lifetime, decision: Decision, split: Split | None
    ) -> list[Interval]:
        """The bytes of a parameter with a decision: m(i, d, p) is the sum over its intervals."""
        p, end = self.ctx.parameters[index], self.places - 1
        ranks = self.ctx.cut(decision).ranks
        gradient_bytes = p.shard_bytes(ranks) if p.requires_grad else 0
        found = [Interval(0, end, p.state_bytes(ranks) - gradient_bytes)]
        if life.gradient is not None:
            found.append(Interval(life.gradient, end, gradient_bytes))
        if not decision.sharded:
            return found
        slices = 1 if split is None or split.along == OF_INPUT else split.slices
        kept = 1.0 if decision.keep else split.kept_slices / slices if split else 0.0
        if life.forward is not None:
            last = (life.backward or life.forward)[1]
            kept_bytes = round(kept * p.full_bytes)
            found.append(Interval(life.forward[0], last, kept_bytes))
            if self.ctx.calls_in_flight > 1:
                found.append(Interval(0, end - 1, (self.ctx.calls_in_flight - 1) * kept_bytes))
        if life.left_out:  # whole one after the other, and never all of them
            return found
        slice_bytes = p.full_bytes // slices
        if kept < 1:
            found += [Interval(*own, slice_bytes) for own in (life.forward, life.backward) if own]
        if life.gradient is not None:
            found.append(Interval(life.gradient, life.gradient, slice_bytes))
        return found

    def _overlaps(
        self, index: int, life: Lifetime, decision: Decision, split: Split | None
    ) -> list[Overlap]:
        """The collectives of a parameter, one of ``inside``; none if it is replicated."""
        if not decision.sharded:
            return []
        gather, reduction, _ = self.seconds_of[index, decision.number]
        slices = 1 if split is None or split.along == OF_INPUT else split.slices
        size_bytes = self.ctx.parameters[index].full_bytes // slices
        found = []
        if life.forward:
            found.append(Overlap(life.forward[0], 0, size_bytes, gather / slices))
        if decision.regathers and life.backward is not None:
            if self._lifetimes[index].backward is not None:
                reduction -= gather
            found.append(Overlap(life.backward[0], 1, size_bytes, gather / slices))
        if life.gradient is not None:
            seconds = max(0.0, reduction) / slices
            found.append(Overlap(life.gradient, 2, size_bytes, seconds))
        return found

    def overlaps(self, key: Candidate) -> list[np.ndarray]:
        """The overlaps of all sharded parameters, by their fields; in order."""
        table = self._tables_of(key)[1]
        own = table[:, self._parameters, key.numbers].reshape(4, -1)
        place, kind, size_bytes, seconds = own[:, own[2] > 0]
        order = np.lexsort((seconds, size_bytes, kind, place))
        numbers = [column[order].astype(np.int64) for column in (place, kind, size_bytes)]
        return [*numbers, seconds[order]]

    def temporary_bytes(self, key: Candidate) -> int:
        """Bytes that the optimizer's step allocates and frees."""
        shards = self._shards[self._parameters, key.numbers]
        return self._step_bytes.most(shards[self._trained])

    def bytes_of(self, key: Candidate) -> np.ndarray:
        """The sum over all parameters of m(i, d, p), by place."""
        table, numbers = self._tables_of(key)[0], key.numbers
        before, found = self._last.get(id(table), (None, None))
        changed = self._parameters if before is None else np.flatnonzero(numbers != before)
        if before is None or found is None or 4 * len(changed) > len(numbers):
            found = self._sum(table, self._parameters, numbers)
            self._last[id(table)] = numbers, found
        else:  # most candidates differ in a few decisions from the one before
            less = self._sum(table, changed, before)
            found = found + self._sum(table, changed, numbers) - less
        found = found.copy()
        found[-1] += self.temporary_bytes(key)
        return found

    def _sum(self, table: np.ndarray, parameters: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The sum over some parameters, by index, of their bytes by place."""
        first, last, size_bytes = table[:, parameters, numbers[parameters]].reshape(3, -1)
        changes = np.zeros(self.places + 1, dtype=np.int64)
        np.add.at(changes, first, size_bytes)
        np.subtract.at(changes, last + 1, size_bytes)
        return np.cumsum(changes[:-1])

    def bytes_at(self, place: int, structure: Candidate) -> np.ndarray:
        """By parameter and decision, m(i, d, p); 0 for an impossible decision.

        ``structure``: recomputation and slices; its decisions do not count.
        """
        first, last, size_bytes = self._tables_of(structure)[0]
        found = np.where((first <= place) & (place <= last), size_bytes, 0).sum(axis=-1)
        return np.where(np.isnan(self.seconds_of[:, :, 0]), 0.0, found)

    def totals(self, key: Candidate) -> np.ndarray:
        """Seconds of communication in the forward, in the backward, and of computing."""
        found: np.ndarray = self.seconds_of[self._parameters, key.numbers].sum(axis=0)
        return found


def _lifetimes(evaluator: PlanEvaluator) -> list[Lifetime]:
    """The lifetime of every parameter, in the context's order."""
    graphs, offset = evaluator.graphs, len(evaluator.place_of[0])
    uses: list[dict[str, tuple[int, int]]] = []
    for gm, places, start in zip(
        (graphs.forward, graphs.backward), evaluator.place_of, (0, offset), strict=True
    ):
        found = {}
        for node in unshards(gm.graph):
            own = [places[u.name] + start for u in effective_users(node) if u.op != "output"]
            if own:
                found[unshard_of(node).name] = min(own), max(own)
        uses.append(found)
    gradients = {
        reduce_grad_of(node).name: evaluator.place_of[1][node.name] + offset
        for node in graphs.backward.graph.nodes
        if node.target is REDUCE_GRAD
    }
    alive = {
        one.name: Lifetime(uses[0].get(one.name), uses[1].get(one.name), gradients.get(one.name))
        for one in evaluator.ctx.parameters
    }
    if evaluator.folded is not None:
        folded, (forward, backward) = evaluator.folded, evaluator.folded.gap
        backward += offset
        for name, like in _likes(folded).items():
            alive[name] = Lifetime(
                (forward, forward) if alive[like].forward else None,
                (backward, backward) if alive[like].backward else None,
                None if alive[like].gradient is None else backward,
                left_out=True,
            )
    return [alive[one.name] for one in evaluator.ctx.parameters]


def _likes(folded: Folded) -> dict[str, str]:
    """For each parameter left out, the corresponding one of the layer before the gap."""
    likes = folded.layers[folded.inner[0] - 1]
    return {
        name: like
        for layer in folded.inner
        for name, like in zip(folded.layers[layer], likes, strict=True)
    }
