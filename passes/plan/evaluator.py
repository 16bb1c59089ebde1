"""The plan evaluator: lower and simulate candidate plans, and keep every prediction."""

from __future__ import annotations

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
from passes.overlap.bucket_collectives import Packable, bucket_bytes_for, packed
from passes.pipeline import Pass
from passes.plan.dynamic_program import choices_of, together
from passes.plan.orders import orders
from passes.plan.predict import LoweredStep, predict
from passes.types.context import Context
from passes.types.hardware import generic
from passes.types.plan import (
    Decision,
    ParameterPlan,
    Plan,
    Prediction,
    Split,
)

#: The size of a bucket is between these.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 10, 1 << 28
#: How many of the fastest are lowered as they would run: then they take a little more or less.
_LOWERED = 8
#: Sets of activations to recompute that there are to choose from.
RECOMPUTE_SETS = 8
#: How many plans refining may look at, and how many nodes it may simulate in all: a second or two.
_MOST_REFINED, _REFINED_NODES = 300, 20_000
#: How many plans of a folded step may be.
_FOLDED_REFINED = 6


class Candidate(NamedTuple):
    """What a plan decides: of every parameter, what is recomputed, and what runs in slices."""

    decisions: tuple[Decision, ...]
    recompute: tuple[str, ...] = ()
    also_save: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()

    def recomputing(self, one: RecomputeSet | None) -> Candidate:
        """The same decisions with a set of activations recomputed."""
        return self._replace(
            recompute=one.recompute if one else (), also_save=one.also_save if one else ()
        )


class PlanEvaluator:
    """The plans that were looked at, and what the simulator said of each."""

    def __init__(
        self,
        captured: Captured | Folded,
        ctx: Context,
        passes: Sequence[Pass],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.captured, self.ctx, self.passes = captured, ctx, passes
        self._say, self._priced = say, 0
        #: What is to run in slices whatever the search finds, and what is recomputed for that.
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
                if (parameter.name not in gathered_again or one.decision.again)
                # Eager code gathers nothing ahead, and no graph shows what it holds.
                and (parameter.name not in unread or not one.decision.sharded)
            ]
            for parameter in ctx.parameters
        ]
        #: Indices of parameters that are decided on together: alike ones of a folded step's layers.
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
        if isinstance(captured, Folded):  # a bucket of several layers is not seen in it
            self.most_bucket_bytes = min(MOST_BUCKET_BYTES, captured.layer_bytes(ctx))
        self.seen: dict[Candidate, tuple[Plan, Prediction]] = {}
        #: Of a folded step: what the last proposal that fits may take, by what is recomputed.
        self.budgets: dict[RecomputeSet | None, int] = {}
        self.left = self.affordable()  # that refining may still take
        #: Bucket sizes that were priced under the limit: what was seen is the best of them.
        self.sizes: dict[Candidate, set[int]] = {}
        #: The collectives of a forward and a backward before they were packed.
        self.packable: dict[Candidate, list[list[Packable] | None]] = {}

    def evaluate(self, key: Candidate) -> Prediction:
        """Lower and simulate a plan, once; the order of its collectives becomes its own."""
        if key not in self.seen:
            self.seen[key] = self.price(key, self.ctx)
            self.sizes[key] = {self.seen[key][0].bucket_bytes}
        return self.seen[key][1]

    def price(
        self, key: Candidate, ctx: Context, bucket_bytes: int | None = None
    ) -> tuple[Plan, Prediction]:
        """Lower and simulate a plan, whatever was seen; it gets the order that was found."""
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
        # A pass of the user's own in the place of ours may leave nothing.
        self.packable[key] = [gm.meta.get(PACKABLE) for gm in (step.forward, step.backward)]
        return plan.replace(order=orders(step)), step.prediction

    def fits(self, prediction: Prediction) -> bool:
        """Whether a peak is within the limit."""
        limit_bytes = self.ctx.limit_bytes
        return limit_bytes is None or prediction.peak_bytes <= limit_bytes

    def fitting(self) -> list[Candidate]:
        """What was looked at and fits."""
        return [key for key, (_, prediction) in self.seen.items() if self.fits(prediction)]

    def fastest(self) -> tuple[Candidate, float]:
        """Of what fits, and its seconds."""
        best = min(self.fitting(), key=self.seconds)
        return best, self.seconds(best)

    def feasible(self, most: int = _LOWERED) -> list[tuple[Plan, LoweredStep]]:
        """Plans that fit, with what the simulator says of each as it will be lowered.

        ``most``: so many of the fastest are lowered. The fastest of them is the first.
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
        """A plan that was looked at as it will be lowered."""
        return predict(self.captured, self.seen[key][0], self.ctx, self.passes)

    @functools.cached_property
    def sets(self) -> list[RecomputeSet]:
        """What may be recomputed, from a little to as much as helps.

        Of a folded step the same in every layer but the first and the last.
        """
        return self._sets(self.ctx)

    @functools.cached_property
    def lean_sets(self) -> list[RecomputeSet]:
        """The same at prices that are not this machine's.

        What takes the least memory must not differ from one measuring to the next. A folded step
        is priced by a profile that was given.
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
            )
        ]

    @functools.cached_property
    def slice_groups(self) -> list[SliceGroup]:
        """What may run in slices, the largest first; of a folded step or of frames nothing.

        Slices of operators in two frames cannot run one after the other.
        """
        if isinstance(self.captured, Folded) or self.captured.is_joined:
            return []
        if self.ctx.slices is not None:
            return []
        return find_slice_groups(self.captured, self.ctx)

    def deciding(self, key: Candidate, decisions: Sequence[Decision]) -> Candidate:
        """Another decision for some parameters; only of what is gathered again slices are kept."""
        if not any(one.kept_slices for one in key.splits):
            return key._replace(decisions=tuple(decisions))
        by_name = self._by_name(decisions)
        splits = (
            one if by_name[one.name].again else one._replace(kept_slices=0) for one in key.splits
        )
        return key._replace(decisions=tuple(decisions), splits=tuple(splits))

    def _by_name(self, decisions: Sequence[Decision]) -> dict[str, Decision]:
        return dict(zip((one.name for one in self.ctx.parameters), decisions, strict=True))

    def slicing(
        self, key: Candidate, slice_group: SliceGroup, slices: int, kept: int | None = None
    ) -> Candidate:
        """The same with a family in so many slices; 1: whole.

        ``kept``: so many slices of each layer are kept, and the others gathered again
        (:meth:`SliceGroup.keeping`); None: what was decided on the weights stays, as it does where
        the weights themselves are not sliced.
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
                    decisions[index] = _sharded(decisions[index].within_host, keeps=whole)
            split = tuple(one._replace(kept_slices=keeping[one.name] % slices) for one in split)
        again = [name for name in slice_group.recompute if name not in key.recompute]
        return key._replace(
            decisions=tuple(decisions),
            recompute=(*key.recompute, *again),
            splits=tuple(sorted([*others, *split])),
        )

    def slices_of(self, key: Candidate, slice_group: SliceGroup) -> tuple[int, int | None]:
        """In how many slices a family runs, and how many of a layer's are kept.

        None: its weights are replicated, or not sliced themselves.
        """
        own = {(one.name, one.along): one for one in key.splits}
        places = [(name, along) for name, along, _ in slice_group.layers[0].along]
        if not all(place in own for place in places):
            return 1, None
        split = [own[place] for place in places]
        by_name = self._by_name(key.decisions)
        if slice_group.of_input or not all(by_name[one.name].sharded for one in split):
            return split[0].slices, None
        kept = (one.slices if by_name[one.name].keeps else one.kept_slices for one in split)
        return split[0].slices, sum(kept)

    @functools.cached_property
    def limited(self) -> bool:
        """Whether the limit takes anything from the fastest of the plans looked at so far.

        It may keep it out, or leave its schedule less room than it could use. Of a folded step
        only the first is asked, for it has few looks.
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
        """Decisions for every parameter, from those for what is decided on together."""
        by_index = {
            index: decision
            for members, decision in zip(self.tied, decisions, strict=True)
            for index in members
        }
        return Candidate(tuple(by_index[index] for index in range(len(self.choices))))

    def may_fit(self, decisions: tuple[Decision, ...]) -> bool:
        """Whether what is held between steps leaves anything of the limit."""
        if self.ctx.limit_bytes is None:
            return True
        plan = self.empty.replace(parameters=_rows(self.ctx, decisions))
        return sum(state_bytes(self.ctx, plan).values()) <= self.ctx.limit_bytes

    def affordable(self) -> int:
        """How many plans may be looked at: fewer of a large graph, which takes long to simulate."""
        if isinstance(self.captured, Folded):
            return _FOLDED_REFINED
        graphs = self.captured.forward.graph, self.captured.backward.graph
        return min(_MOST_REFINED, _REFINED_NODES // sum(len(graph.nodes) for graph in graphs))

    def seconds(self, key: Candidate) -> float:
        """Of a step, by a plan that was looked at."""
        return self.seen[key][1].step_seconds

    def alike(self) -> list[list[int]]:
        """Indices of parameters that differ in a layer's number only, the largest group first."""
        return sorted(alike(self.ctx.parameters), key=self.size_bytes, reverse=True)

    def size_bytes(self, members: list[int]) -> int:
        """Of some parameters, whole."""
        return sum(self.ctx.parameters[index].full_bytes for index in members)

    def with_buckets(self, key: Candidate, size_bytes: int) -> bool:
        """Whether a plan fits and is faster with buckets of another size; it then has them."""
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
        """Whether a plan that was priced has the same buckets by both sizes."""
        return all(
            starts is not None and packed(starts, one_bytes) == packed(starts, other_bytes)
            for starts in self.packable[key]
        )


def _collect() -> None:
    """Free the graphs of the plan that was looked at last."""
    if not gc.isenabled():
        gc.collect(0)


def _sharded(within_host: bool, keeps: bool) -> Decision:
    """To shard, over all ranks or within hosts, and keep what is gathered or gather it again."""
    if within_host:
        return Decision.SHARD_HOST_KEEP if keeps else Decision.SHARD_HOST_AGAIN
    return Decision.SHARD_KEEP if keeps else Decision.SHARD_AGAIN


def _tied(captured: Captured | Folded, ctx: Context) -> list[list[int]]:
    """Indices of parameters by what is decided on together, in the parameters' order."""
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
    """A plan's rows, with what each decision saves of what is held between steps."""
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
