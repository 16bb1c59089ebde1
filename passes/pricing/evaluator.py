"""The plan evaluator: lower and simulate candidates, and keep what the simulation says of each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from passes.annotate.annotate_costs import cost_of
from passes.candidates.candidate import Candidate, rows_of
from passes.candidates.choices import Choice, choices_of
from passes.candidates.move_groups import MoveGroup, MoveGroups, find_move_groups
from passes.candidates.recompute_sets import Recomputation, RecomputeSet
from passes.candidates.slice_groups import SliceGroup, find_slice_groups, splits_by_hand
from passes.capture.fold_layers import Folded, recomputes_regularly
from passes.graph.attribution import attribution
from passes.graph.captured import Captured
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import is_collective
from passes.graph.metadata import PACKABLE
from passes.overlap.bucket_collectives import bucket_bytes_for, packed
from passes.pipeline import Pass
from passes.pricing.orders import orders, with_fastest_order
from passes.pricing.predict import LoweredStep, predict
from passes.types.annotations import Packable
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.hardware import generic
from passes.types.plan import Plan, Prediction, Split

#: Limits of the bucket size, in bytes.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 10, 1 << 28
#: Number of fine recompute sets for one of those to choose from.
FINER = 8
#: Number of recompute sets to choose from.
RECOMPUTE_SETS = 8


class Evaluated(NamedTuple):
    """A candidate's plan, and what its simulation says.

    ``bytes_at``: bytes alive at every captured node of the forward and the backward and at the
    optimizer's step while no collective overlaps compute; None without a memory limit.
    ``seconds_at``: seconds of computing at every captured node.
    ``network_seconds``, ``exposed_seconds``: of the forward and of the backward, without the
    model's own collectives.
    """

    plan: Plan
    prediction: Prediction
    bytes_at: np.ndarray | None
    seconds_at: np.ndarray
    network_seconds: tuple[float, float]
    exposed_seconds: tuple[float, float]


class Finished(NamedTuple):
    """A candidate with its plan, which has an order of collectives, and the plan lowered."""

    key: Candidate
    plan: Plan
    step: LoweredStep

    @property
    def prediction(self) -> Prediction:
        return self.step.prediction


def varied(found: Iterable[Finished], slower: float) -> list[Finished]:
    """Plans, the fastest first, but at first the fastest one of each slicing.

    ``slower``: plans that are slower than the fastest one by more than this factor come later.
    """
    by_time = sorted(found, key=lambda one: one.prediction.step_seconds)
    firsts = {one.key.splits: one.key for one in reversed(by_time)}

    def is_later(one: Finished) -> bool:
        most_seconds = slower * by_time[0].prediction.step_seconds
        return one.key != firsts[one.key.splits] or one.prediction.step_seconds > most_seconds

    return sorted(by_time, key=is_later)


def above_target(bytes_at: np.ndarray | None, target_bytes: int) -> int:
    """The sum over all places of the bytes above a target."""
    return 0 if bytes_at is None else int(np.maximum(bytes_at - target_bytes, 0).sum())


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Turn automatic garbage collection off; the evaluator collects the youngest objects only.

    Graphs are reference cycles, so they need garbage collection. But automatic collections search
    all objects of torch again and again, which takes much time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class PlanEvaluator:
    """The evaluated candidates of a step under one memory limit."""

    def __init__(
        self,
        captured: Captured | Folded,
        ctx: Context,
        passes: Sequence[Pass],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.captured, self.ctx, self.passes = captured, ctx, passes
        self.folded = captured if isinstance(captured, Folded) else None
        self.graphs = captured.captured if isinstance(captured, Folded) else captured
        self._say, self._priced = say, 0
        #: User-forced slices, and the tensors to recompute for them.
        self.by_hand: tuple[Split, ...] = ()
        self.again_by_hand: tuple[str, ...] = ()
        if ctx.slices and self.folded is None:
            self.by_hand, self.again_by_hand = splits_by_hand(self.graphs, ctx)
        self.choices = self._choices()
        self.most_bucket_bytes = MOST_BUCKET_BYTES
        if self.folded is not None:  # a folded step cannot show a bucket of several layers
            self.most_bucket_bytes = min(MOST_BUCKET_BYTES, self.folded.layer_bytes(ctx))
        self.seen: dict[Candidate, Evaluated] = {}
        #: The last and the best lowered candidate of a folded step. Their order stays open: they
        #: are lowered once.
        self._last: Finished | None = None
        self._best: Finished | None = None
        #: The evaluation budget that is left; the search sets it.
        self.left = 0
        #: The peak to reach: the memory limit, unless the least memory is searched.
        self.target_bytes = ctx.limit_bytes
        #: Whether memory restricts the search.
        self.is_short = ctx.limit_bytes is not None
        #: Evaluated bucket sizes, by candidate without bucket size.
        self._sizes: dict[Candidate, list[int]] = {}
        #: By candidate, the one with the same buckets that was lowered.
        self._owner: dict[Candidate, Candidate] = {}
        #: By candidate, the collectives of the forward and the backward before packing.
        self._packable: dict[Candidate, list[list[Packable] | None]] = {}

    def _choices(self) -> list[list[Choice]]:
        gathered_again = {one.name for one in self.by_hand if one.kept_slices}
        return [
            [
                one
                for one in choices_of(parameter, self.ctx)
                if (parameter.name not in gathered_again or one.decision.regathers)
                # Eager code does not gather ahead, and no graph shows its memory.
                and (parameter.name not in self.graphs.unread or not one.decision.sharded)
            ]
            for parameter in self.ctx.parameters
        ]

    def evaluate(self, key: Candidate) -> Evaluated:
        """The evaluation of a candidate, made once. Its plan has the order that is found."""
        if key in self.seen:
            return self.seen[key]
        without = key.replace(bucket_bytes=0)
        for size in self._sizes.get(without, ()):
            other = key.replace(bucket_bytes=size)
            if self._packs_alike(other, size, key.bucket_bytes):
                self.seen[key] = self.seen[other]
                self._owner[key] = self._owner[other]
                return self.seen[key]
        self.left -= 1
        self._owner[key] = key
        self.seen[key] = self._price(key)
        self._sizes.setdefault(without, []).append(key.bucket_bytes)
        return self.seen[key]

    def _price(self, key: Candidate) -> Evaluated:
        self._keep_best()  # first, or the graphs of the last one outlive the collection
        if not gc.isenabled():
            gc.collect(0)  # the graphs of the last evaluation
        self._priced += 1
        self._say(f"plan {self._priced} of up to {self._priced + max(0, self.left)}")
        plan = self.plan_of(key)
        step = predict(self.captured, plan, self.ctx.replace(deciding=True), self.passes)
        # A user's pass in place of ``bucket`` may leave no such metadata.
        self._packable[key] = [PACKABLE.get(gm) for gm in (step.forward, step.backward)]
        network = [
            sum(cost_of(node).seconds for node in gm.graph.nodes if is_collective(node))
            for gm in (step.forward, step.backward)
        ]
        exposed = [one.exposed_seconds - one.model_seconds for one in step.simulations]
        plan = plan.replace(order=orders(step))
        if self.folded is not None:
            self._last = Finished(key, plan, step)
        return Evaluated(
            plan,
            step.prediction,
            None if self.ctx.limit_bytes is None else step.bytes_at(self.place_of),
            step.seconds_at(self.place_of),
            (network[0], network[1]),
            (exposed[0], exposed[1]),
        )

    def _keep_best(self) -> None:
        """Keep the better one of a folded step's last candidate and the best one before."""
        last, self._last = self._last, None
        if last is None or not self.fits(last.prediction):
            return
        if self._best is None or self.rank(last.key) < self.rank(self._best.key):
            self._best = last

    def plan_of(self, key: Candidate) -> Plan:
        """The plan of a candidate, without an order."""
        return Plan(
            rows_of(self.ctx, key.decisions, (*self.by_hand, *key.splits), key.stays),
            world_size=self.ctx.world_size,
            memory_limit_bytes=self.ctx.limit_bytes,
            bucket_bytes=key.bucket_bytes,
            ranks_of_a_host=self.ctx.ranks_of_a_host,
            recompute=tuple(dict.fromkeys((*key.recompute, *self.again_by_hand))),
            also_save=key.also_save,
        )

    @functools.cached_property
    def place_of(self) -> tuple[dict[str, int], dict[str, int]]:
        """The places of the captured nodes, by name, in the forward and in the backward."""
        forward, backward = (
            {node.name: place for place, node in enumerate(gm.graph.nodes)}
            for gm in (self.graphs.forward, self.graphs.backward)
        )
        return forward, backward

    def rank(self, key: Candidate) -> tuple[int, float]:
        """The objective, for an evaluated candidate: bytes above the target, then seconds.

        Bytes above the target are summed over all places.
        """
        found = self.seen[key]
        above = 0
        if self.target_bytes is not None and found.prediction.peak_bytes > self.target_bytes:
            above = found.prediction.peak_bytes - self.target_bytes
            above += above_target(found.bytes_at, self.target_bytes)
        return above, found.prediction.step_seconds

    def evaluated_rank(self, key: Candidate) -> tuple[int, float]:
        """The objective for a candidate, which is evaluated first if it is not yet."""
        self.evaluate(key)
        return self.rank(key)

    def seconds(self, key: Candidate) -> float:
        """Seconds per step of an evaluated candidate."""
        return self.seen[key].prediction.step_seconds

    def peak_bytes(self, key: Candidate) -> int:
        """The peak of a candidate."""
        return self.evaluate(key).prediction.peak_bytes

    def is_reached(self, key: Candidate) -> bool:
        """Whether a search for the least memory has reached its target."""
        return self.ctx.limit_bytes == 0 and self.rank(key)[0] == 0

    def is_limited(self, fastest: Candidate) -> bool:
        """Whether the limit restricts the fastest candidate.

        Either it does not fit, or its schedule would use more memory than the limit allows. For a
        folded step, only the first counts.
        """
        fits = self.fits(self.seen[fastest].prediction)
        if not fits or self.folded is not None:
            return not fits
        free = self.ctx.replace(limit_bytes=None, deciding=True)
        found = predict(self.captured, self.plan_of(fastest), free, self.passes)
        return not self.fits(found.prediction)

    def fits(self, prediction: Prediction) -> bool:
        """Whether the peak is within the memory limit."""
        limit_bytes = self.ctx.limit_bytes
        return limit_bytes is None or prediction.peak_bytes <= limit_bytes

    def fitting(self, slicings: int = 0) -> list[Candidate]:
        """The evaluated candidates that fit, the fastest first.

        ``slicings``: the fastest one of each of so many slicings precedes all others.
        """
        fits = [key for key, one in self.seen.items() if self.fits(one.prediction)]
        found = sorted(fits, key=self.rank)
        firsts: dict[tuple[Split, ...], Candidate] = {}
        for key in found:
            if len(firsts) < slicings:
                firsts.setdefault(key.splits, key)
        chosen = set(firsts.values())
        return [*firsts.values(), *(key for key in found if key not in chosen)]

    def lowered(self, key: Candidate) -> Finished:
        """An evaluated plan, lowered with its own order of collectives."""
        plan = self.seen[key].plan
        for found in (self._last, self._best):
            if found is not None and found.key == key:
                return found
        return Finished(key, plan, predict(self.captured, plan, self.ctx, self.passes))

    def ordered(self, found: Finished) -> Finished:
        """The plan with the fastest order of collectives that is found.

        A folded step leaves the order open.
        """
        if isinstance(self.captured, Folded):
            return found
        plan, step = with_fastest_order(
            found.plan, found.step, self.captured, self.ctx, self.passes
        )
        return Finished(found.key, plan, step)

    @functools.cached_property
    def recomputation(self) -> Recomputation:
        """The recomputation of saved tensors.

        For the least memory, at the costs of a generic machine: it does not depend on a
        calibration of this machine.
        """
        if self.folded is not None:
            before, _ = self.folded.at_the_cut
            stands_for = before, 1 + len(self.folded.inner)
            return Recomputation(self.graphs, self.ctx, self.folded.alike, stands_for)
        least = self.ctx.limit_bytes == 0
        ctx = self.ctx.replace(hardware=generic()) if least else self.ctx
        return Recomputation(self.graphs, ctx)

    @functools.cached_property
    def sets(self) -> list[RecomputeSet]:
        """The recompute sets, from a small saving to the largest useful one.

        In a folded step, all layers except the first and the last recompute the same tensors.
        """
        return self._sets(RECOMPUTE_SETS)

    @functools.cached_property
    def fine_sets(self) -> list[RecomputeSet]:
        """More recompute sets, nearer to each other."""
        return self._sets(FINER * RECOMPUTE_SETS)

    def _sets(self, most: int) -> list[RecomputeSet]:
        found = self.recomputation.sets(most)
        if self.folded is None:
            return found
        empty = Plan((), world_size=self.ctx.world_size)
        return [
            one
            for one in found
            if recomputes_regularly(
                self.folded,
                empty.replace(recompute=one.recompute, also_save=one.also_save),
                self.ctx,
            )
        ]

    @functools.cached_property
    def slice_groups(self) -> list[SliceGroup]:
        """The slice groups, the largest first.

        None for joined frames (slices of operators in two frames cannot run one after the other),
        and with user-forced slices.
        """
        if self.graphs.is_joined or self.ctx.slices is not None:
            return []
        return find_slice_groups(self.graphs, self.ctx, self._left_out)

    def is_at_peak(self, group: SliceGroup, key: Candidate) -> bool:
        """Whether an evaluated candidate has its peak, without overlap, at a group's operators."""
        bytes_at = self.seen[key].bytes_at
        assert bytes_at is not None
        place = int(np.argmax(bytes_at))
        for phase, (serving, nodes) in enumerate(zip(self._serving, self.place_of, strict=True)):
            for layer in group.layers:
                own = [one for name, _, _ in layer.along for one in serving.get(name, ())]
                if group.of_input and own:  # its rows, to the loss and back
                    own.append(0 if phase else len(nodes) - 1)
                if own and min(own) <= place <= max(own):
                    return True
            place -= len(nodes)
        return False

    @functools.cached_property
    def _serving(self) -> list[dict[str, list[int]]]:
        """By graph and parameter, the places of the captured nodes that serve it."""
        found: list[dict[str, list[int]]] = [{}, {}]
        for gm, serving in zip((self.graphs.forward, self.graphs.backward), found, strict=True):
            for place, names in enumerate(attribution(Dataflow(gm.graph))):
                for name in names:
                    serving.setdefault(name, []).append(place)
        return found

    @functools.cached_property
    def move_groups(self) -> MoveGroups:
        """The groups to which activations may move; none if the option is off.

        None for joined frames.
        """
        if not self.ctx.tensor_parallel or self.graphs.is_joined or self.ctx.world_size == 1:
            return MoveGroups()
        return find_move_groups(self.graphs, self.ctx, self._left_out)

    @property
    def _left_out(self) -> Collection[str]:
        """The parameters of the layers that a folded step leaves out."""
        return () if self.folded is None else self.folded.left_out

    def _stay_by_hand(self) -> list[MoveGroup]:
        """The groups that the user names; of the same weights, the first one.

        Raises:
            ValueError: activations cannot move to a named parameter. The message has the reason.
        """
        names = self.ctx.tensor_parallel
        if isinstance(names, bool):
            return []
        found = self.move_groups
        for name in names:
            if not any(name in group.dims for group in found.groups):
                reason = found.refused.get(name, "it is in no group of products")
                raise ValueError(f"activations cannot move to parameter {name!r}: {reason}")
        firsts = [own[0] for own in found.by_weights]
        return [group for group in firsts if any(name in group.dims for name in names)]

    def uniform(self, option: int) -> Candidate:
        """One decision for all parameters, at the default bucket size.

        Parameters that the user lets stay do.

        ``option``: the number of the choice; of a parameter with fewer choices, its last one.
        """
        decisions: list[Decision] = [o[min(option, len(o) - 1)].decision for o in self.choices]
        key = Candidate(tuple(decisions), bucket_bytes_for(self.ctx))
        for group in self._stay_by_hand():
            key = key.moving(group, True, self.ctx)
        return key

    def other_sizes(self, key: Candidate) -> list[int]:
        """The next two larger and smaller bucket sizes that pack an evaluated candidate otherwise.

        Sizes are powers of two times the candidate's.
        """
        found: list[int] = []
        for factor in (0.5, 2.0):
            size, last, count = key.bucket_bytes, key.bucket_bytes, 0
            while count < 2:
                size = round(size * factor)
                if not LEAST_BUCKET_BYTES <= size <= self.most_bucket_bytes:
                    break
                if not self._packs_alike(key, size, last):
                    found.append(size)
                    last, count = size, count + 1
        return found

    def _packs_alike(self, key: Candidate, one_bytes: int, other_bytes: int) -> bool:
        """Whether both bucket sizes give an evaluated candidate the same buckets."""
        return all(
            starts is not None and packed(starts, one_bytes) == packed(starts, other_bytes)
            for starts in self._packable[self._owner[key]]
        )
