"""The plan evaluator: lower and simulate candidates, and cache their predictions."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from passes.annotate.training_state import state_bytes
from passes.candidates.parameter_groups import alike
from passes.candidates.recompute_sets import RecomputeSet, recompute_sets
from passes.candidates.slice_groups import SliceGroup, find_slice_groups, splits_by_hand
from passes.capture.captured_step import Captured
from passes.capture.fold_layers import Folded, recomputes_regularly
from passes.graph.metadata import PACKABLE
from passes.overlap.bucket_collectives import bucket_bytes_for, packed
from passes.pipeline import Pass
from passes.plan.dynamic_program import choices_of, together
from passes.plan.orders import orders
from passes.plan.predict import LoweredStep, predict
from passes.types.annotations import Packable
from passes.types.context import Context
from passes.types.decision import Decision, Scope
from passes.types.hardware import generic
from passes.types.plan import ParameterPlan, Plan, Prediction, Split

#: Limits of the bucket size, in bytes.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 10, 1 << 28
#: Number of the fastest plans to predict as they will run, which changes their time a little.
_LOWERED = 8
#: Number of recompute sets to choose from.
RECOMPUTE_SETS = 8
#: Evaluation budget of refinement: number of plans, and number of simulated nodes in all.
_MOST_REFINED, _REFINED_NODES = 300, 20_000
#: Evaluation budget for a folded step.
_FOLDED_REFINED = 6


class Candidate(NamedTuple):
    """The decisions of a plan: of every parameter, the recomputed tensors, and the slices.

    ``also_save``: keys of further tensors to save for the recomputation.
    """

    decisions: tuple[Decision, ...]
    recompute: tuple[str, ...] = ()
    also_save: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()

    def recomputing(self, one: RecomputeSet | None) -> Candidate:
        """The same decisions with this recompute set; None: without recomputation."""
        return self._replace(
            recompute=one.recompute if one else (), also_save=one.also_save if one else ()
        )


class PlanEvaluator:
    """The evaluated candidates, with the plan and the prediction of each."""

    def __init__(
        self,
        captured: Captured | Folded,
        ctx: Context,
        passes: Sequence[Pass],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.captured, self.ctx, self.passes = captured, ctx, passes
        self._say, self._priced = say, 0
        #: User-forced slices, and the tensors to recompute for them.
        self.by_hand: tuple[Split, ...] = ()
        self.again_by_hand: tuple[str, ...] = ()
        if ctx.slices and not isinstance(captured, Folded):
            self.by_hand, self.again_by_hand = splits_by_hand(captured, ctx)
        gathered_again = {one.name for one in self.by_hand if one.kept_slices}
        unread = captured.unread if isinstance(captured, Captured) else frozenset()
        self.choices = [
            [
                one
                for one in choices_of(parameter, ctx)
                if (parameter.name not in gathered_again or one.decision.regathers)
                # Eager code does not gather ahead, and no graph shows its memory.
                and (parameter.name not in unread or not one.decision.sharded)
            ]
            for parameter in ctx.parameters
        ]
        #: Indices of parameters that share one decision: those of a folded step's equal layers.
        self.tied = _tied(captured, ctx)
        self.tied_choices = [together([self.choices[i] for i in own]) for own in self.tied]
        self.empty = Plan(
            (),
            world_size=ctx.world_size,
            memory_limit_bytes=ctx.limit_bytes,
            bucket_bytes=bucket_bytes_for(ctx),
            ranks_of_a_host=ctx.ranks_of_a_host,
        )
        self.most_bucket_bytes = MOST_BUCKET_BYTES
        if isinstance(captured, Folded):  # a folded step cannot show a bucket of several layers
            self.most_bucket_bytes = min(MOST_BUCKET_BYTES, captured.layer_bytes(ctx))
        self.seen: dict[Candidate, tuple[Plan, Prediction]] = {}
        #: For a folded step: the memory budget of the last proposal that fits, by recompute set.
        self.budgets: dict[RecomputeSet | None, int] = {}
        self.left = self.affordable()  # remaining evaluations of refinement
        #: Evaluated bucket sizes, with the memory limit; ``seen`` has the best of them.
        self.sizes: dict[Candidate, set[int]] = {}
        #: By candidate, the collectives of the forward and the backward before packing.
        self.packable: dict[Candidate, list[list[Packable] | None]] = {}

    def starting_with(self, bucket_bytes: int) -> PlanEvaluator:
        """This evaluator, with its cache, but with another bucket size for new candidates."""
        other = copy.copy(self)
        other.empty = self.empty.replace(bucket_bytes=bucket_bytes)
        return other

    def evaluate(self, key: Candidate) -> Prediction:
        """The prediction of a candidate, evaluated once. Its plan gets the order that is found."""
        if key not in self.seen:
            self.seen[key] = self.price(key, self.ctx)
            self.sizes[key] = {self.seen[key][0].bucket_bytes}
        return self.seen[key][1]

    def price(
        self, key: Candidate, ctx: Context, bucket_bytes: int | None = None
    ) -> tuple[Plan, Prediction]:
        """Lower and simulate a candidate, without the cache.

        ``bucket_bytes``: the bucket size; None: the default of ``empty``.

        Returns the plan, with the order of collectives that was found, and the prediction.
        """
        _collect()
        self._priced += 1
        self._say(f"plan {self._priced} of up to {self._priced + self.left}")
        plan = self.empty.replace(
            parameters=_rows(ctx, key.decisions, (*self.by_hand, *key.splits)),
            recompute=tuple(dict.fromkeys((*key.recompute, *self.again_by_hand))),
            also_save=key.also_save,
        )
        if bucket_bytes is not None:
            plan = plan.replace(bucket_bytes=bucket_bytes)
        step = predict(self.captured, plan, ctx.replace(deciding=True), self.passes)
        # A user's pass in place of ``bucket`` may leave no such metadata.
        self.packable[key] = [PACKABLE.get(gm) for gm in (step.forward, step.backward)]
        return plan.replace(order=orders(step)), step.prediction

    def fits(self, prediction: Prediction) -> bool:
        """Whether the peak is within the memory limit."""
        limit_bytes = self.ctx.limit_bytes
        return limit_bytes is None or prediction.peak_bytes <= limit_bytes

    def fitting(self) -> list[Candidate]:
        """The evaluated candidates that fit."""
        return [key for key, (_, prediction) in self.seen.items() if self.fits(prediction)]

    def fastest(self) -> tuple[Candidate, float]:
        """The fastest evaluated candidate that fits, and its seconds per step."""
        best = min(self.fitting(), key=self.seconds)
        return best, self.seconds(best)

    def feasible(self, most: int = _LOWERED) -> list[tuple[Plan, LoweredStep]]:
        """The fastest plans that still fit when lowered with their own order; the fastest first.

        ``most``: stop after this number of plans (a folded step: after one).
        """
        found: list[tuple[Plan, LoweredStep]] = []
        for key in sorted(self.fitting(), key=self.seconds):
            step = self.lowered(key)
            if self.fits(step.prediction):
                found.append((self.seen[key][0], step))
            if len(found) == (1 if isinstance(self.captured, Folded) else most):
                break
        return sorted(found, key=lambda pair: pair[1].prediction.step_seconds)

    def lowered(self, key: Candidate) -> LoweredStep:
        """An evaluated plan, lowered with its own order of collectives."""
        return predict(self.captured, self.seen[key][0], self.ctx, self.passes)

    @functools.cached_property
    def sets(self) -> list[RecomputeSet]:
        """The recompute sets, from a small saving to the largest useful one.

        In a folded step, all layers except the first and the last recompute the same tensors.
        """
        return self._sets(self.ctx)

    @functools.cached_property
    def lean_sets(self) -> list[RecomputeSet]:
        """The recompute sets with the costs of a generic machine.

        So the least memory does not depend on a calibration of this machine. A folded step uses
        the profile that the user gives.
        """
        if isinstance(self.captured, Folded):
            return self.sets
        return self._sets(self.ctx.replace(hardware=generic()))

    def _sets(self, ctx: Context) -> list[RecomputeSet]:
        if not isinstance(self.captured, Folded):
            return recompute_sets(self.captured, ctx, RECOMPUTE_SETS)
        found = recompute_sets(self.captured.captured, ctx, RECOMPUTE_SETS, self.captured.alike)
        return [
            one
            for one in found
            if recomputes_regularly(
                self.captured,
                self.empty.replace(recompute=one.recompute, also_save=one.also_save),
                ctx,
            )
        ]

    @functools.cached_property
    def slice_groups(self) -> list[SliceGroup]:
        """The slice groups, the largest first.

        None for a folded step, for joined frames (slices of operators in two frames cannot run one
        after the other), and with user-forced slices.
        """
        if isinstance(self.captured, Folded) or self.captured.is_joined:
            return []
        if self.ctx.slices is not None:
            return []
        return find_slice_groups(self.captured, self.ctx)

    def deciding(self, key: Candidate, decisions: Sequence[Decision]) -> Candidate:
        """The candidate with other decisions. Only regathered weights keep some of their slices."""
        if not any(one.kept_slices for one in key.splits):
            return key._replace(decisions=tuple(decisions))
        by_name = self._by_name(decisions)
        splits = (
            one if by_name[one.name].regathers else one._replace(kept_slices=0)
            for one in key.splits
        )
        return key._replace(decisions=tuple(decisions), splits=tuple(splits))

    def _by_name(self, decisions: Sequence[Decision]) -> dict[str, Decision]:
        return dict(zip((one.name for one in self.ctx.parameters), decisions, strict=True))

    def slicing(
        self, key: Candidate, slice_group: SliceGroup, slices: int, kept: int | None = None
    ) -> Candidate:
        """The candidate with a slice group in this number of slices; 1: whole.

        ``kept``: the number of slices that each layer keeps gathered; the others are regathered
        (:meth:`SliceGroup.keeping`). None: the decisions on the weights stay. They also stay if
        the rows of the input are sliced.
        """
        others = [one for one in key.splits if one.name not in slice_group.names]
        if slices == 1:
            return key._replace(splits=tuple(others))
        split = slice_group.into(slices)
        decisions = list(key.decisions)
        if kept is not None and not slice_group.of_input:
            keeping = slice_group.keeping(slices, kept)
            for index, one in enumerate(self.ctx.parameters):
                if one.name in keeping:
                    whole = keeping[one.name] == slices
                    scope = decisions[index].scope if decisions[index].sharded else Scope.ALL
                    decisions[index] = Decision(scope, keep=whole)
            split = tuple(one._replace(kept_slices=keeping[one.name] % slices) for one in split)
        again = [name for name in slice_group.recompute if name not in key.recompute]
        return key._replace(
            decisions=tuple(decisions),
            recompute=(*key.recompute, *again),
            splits=tuple(sorted([*others, *split])),
        )

    def slices_of(self, key: Candidate, slice_group: SliceGroup) -> tuple[int, int | None]:
        """The number of slices of a slice group, and the number that each layer keeps gathered.

        The latter is None if the group is whole, if a weight is replicated, or if the rows of the
        input are sliced.
        """
        own = {(one.name, one.along): one for one in key.splits}
        places = [(name, along) for name, along, _ in slice_group.layers[0].along]
        if not all(place in own for place in places):
            return 1, None
        split = [own[place] for place in places]
        by_name = self._by_name(key.decisions)
        if slice_group.of_input or not all(by_name[one.name].sharded for one in split):
            return split[0].slices, None
        kept = (one.slices if by_name[one.name].keep else one.kept_slices for one in split)
        return split[0].slices, sum(kept)

    @functools.cached_property
    def limited(self) -> bool:
        """Whether the memory limit restricts the fastest plan evaluated so far.

        Either the plan does not fit, or its schedule would use more memory than the limit allows.
        A folded step, which has a small evaluation budget, checks the first case only.
        """
        if self.ctx.limit_bytes is None:
            return False
        fastest = min(self.seen, key=self.seconds)
        plan, prediction = self.seen[fastest]
        fits = self.fits(prediction)
        if not fits or isinstance(self.captured, Folded):
            return not fits
        _, free = self.price(fastest, self.ctx.replace(limit_bytes=None), plan.bucket_bytes)
        return not self.fits(free)

    def spread(self, decisions: Sequence[Decision]) -> Candidate:
        """A candidate from one decision for each group of ``tied`` parameters."""
        by_index = {
            index: decision
            for members, decision in zip(self.tied, decisions, strict=True)
            for index in members
        }
        return Candidate(tuple(by_index[index] for index in range(len(self.choices))))

    def may_fit(self, decisions: tuple[Decision, ...]) -> bool:
        """Whether the state between steps is within the memory limit."""
        if self.ctx.limit_bytes is None:
            return True
        plan = self.empty.replace(parameters=_rows(self.ctx, decisions))
        return sum(state_bytes(self.ctx, plan).values()) <= self.ctx.limit_bytes

    def affordable(self) -> int:
        """The evaluation budget: smaller for a large graph, which takes long to simulate."""
        if isinstance(self.captured, Folded):
            return _FOLDED_REFINED
        graphs = self.captured.forward.graph, self.captured.backward.graph
        return min(_MOST_REFINED, _REFINED_NODES // sum(len(graph.nodes) for graph in graphs))

    def seconds(self, key: Candidate) -> float:
        """Seconds per step of an evaluated candidate."""
        return self.seen[key][1].step_seconds

    def alike(self) -> list[list[int]]:
        """Indices of parameters whose names differ only in numbers, the largest group first."""
        return sorted(alike(self.ctx.parameters), key=self.size_bytes, reverse=True)

    def size_bytes(self, members: list[int]) -> int:
        """Bytes of some parameters, unsharded."""
        return sum(self.ctx.parameters[index].full_bytes for index in members)

    def with_buckets(self, key: Candidate, size_bytes: int) -> bool:
        """Try another bucket size for an evaluated candidate, and adopt it if that is better.

        Better means: it fits, and it is faster or the candidate did not fit. Returns whether it
        is adopted.
        """
        self.sizes[key].add(size_bytes)
        if self.packs_alike(key, self.seen[key][0].bucket_bytes, size_bytes):
            return False
        found = self.price(key, self.ctx, size_bytes)
        faster = found[1].step_seconds < self.seconds(key) or not self.fits(self.seen[key][1])
        if self.fits(found[1]) and faster:
            self.seen[key] = found
            return True
        return False

    def packs_alike(self, key: Candidate, one_bytes: int, other_bytes: int) -> bool:
        """Whether both bucket sizes give an evaluated candidate the same buckets."""
        return all(
            starts is not None and packed(starts, one_bytes) == packed(starts, other_bytes)
            for starts in self.packable[key]
        )


def _collect() -> None:
    """Free the graphs of the last evaluation, if automatic garbage collection is off."""
    if not gc.isenabled():
        gc.collect(0)


def _tied(captured: Captured | Folded, ctx: Context) -> list[list[int]]:
    """Groups of indices of the parameters that share one decision, in the parameters' order."""
    place: dict[str, Hashable] = {}
    if isinstance(captured, Folded):
        place = {name: i for names in captured.layers for i, name in enumerate(names)}
    found: dict[Hashable, list[int]] = {}
    for index, parameter in enumerate(ctx.parameters):
        found.setdefault(place.get(parameter.name, parameter.name), []).append(index)
    return list(found.values())


def _rows(
    ctx: Context, decisions: Sequence[Decision], splits: Sequence[Split] = ()
) -> tuple[ParameterPlan, ...]:
    """The rows of a plan, with the state bytes that each decision saves between steps."""
    sliced = {one.name: one for one in splits}
    rows = []
    for p, decision in zip(ctx.parameters, decisions, strict=True):
        split = sliced.get(p.name, Split(p.name, 1))
        saved_bytes = p.state_bytes(1) - p.state_bytes(ctx.cut(decision).ranks)
        rows.append(
            ParameterPlan(
                **split._asdict(),
                shape=p.shape,
                dtype=p.dtype,
                decision=decision,
                saved_bytes=saved_bytes,
            )
        )
    return tuple(rows)
