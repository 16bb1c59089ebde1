"""Candidates: the decisions of a plan before it is priced, and the changes from one to the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from passes.candidates.move_groups import MoveGroup
from passes.candidates.recompute_sets import RecomputeSet
from passes.candidates.slice_groups import SliceGroup
from passes.types.context import Context
from passes.types.decision import Decision, Moves, Scope
from passes.types.plan import ParameterPlan, Split


class Stays(NamedTuple):
    """A parameter that stays where it is while activations move.

    ``place``: its index in the context's parameters. ``dim``: the dimension that the ranks share.
    ``decision``: the ranks that share it (all of them, or those of a host), and whether the
    backward reads the gathered tokens of the forward. ``chunks``: those in which tokens travel.
    ``alone``: its product is a group of its own.
    """

    place: int
    name: str
    dim: int
    decision: Decision = Decision.SHARD_REGATHER
    chunks: int = 1
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The decisions of a plan.

    ``decisions``: of every parameter, in the context's order. ``bucket_bytes``: the bucket size.
    ``recompute``, ``also_save``, ``splits``: as in :class:`passes.types.plan.Plan`.
    ``stays``: the parameters that stay where they are. They have the decisions given there and run
    whole, whatever decision or slices a change gives them.
    """

    decisions: tuple[Decision, ...]
    bucket_bytes: int
    recompute: tuple[str, ...] = ()
    also_save: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    stays: tuple[Stays, ...] = ()

    def __hash__(self) -> int:  # of hundreds of decisions, and asked for often
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        parts = self.bucket_bytes, self.recompute, self.also_save, self.splits, self.stays
        return hash((self.numbers.tobytes(), *parts))

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """By parameter, the number of its decision; of one that stays, never a kept one's."""
        found = np.array([decision.number for decision in self.decisions])
        for one in self.stays:
            found[one.place] = Decision(one.decision.scope).number
        return found

    def replace(self, **changes: Any) -> Candidate:
        """A copy with some fields changed."""
        made = dataclasses.replace(self, **changes)
        if not made.stays:
            return made
        decisions = list(made.decisions)
        for one in made.stays:
            decisions[one.place] = one.decision
        names = {one.name for one in made.stays}
        splits = tuple(one for one in made.splits if not {one.name, one.like} & names)
        return dataclasses.replace(made, decisions=tuple(decisions), splits=splits)

    def recomputing(self, one: RecomputeSet | None) -> Candidate:
        """The same with this recompute set; None: without recomputation."""
        return self.replace(
            recompute=one.recompute if one else (), also_save=one.also_save if one else ()
        )

    def moving(
        self, group: MoveGroup, activations: bool, ctx: Context, chunks: int = 1
    ) -> Candidate:
        """The same with activations, or with the weights, of a move group moving.

        ``chunks``: those in which activations move.
        """
        others = [one for one in self.stays if one.name not in group.dims]
        if activations:
            others += [
                Stays(index, one.name, group.dims[one.name], group.decision, chunks, group.alone)
                for index, one in enumerate(ctx.parameters)
                if one.name in group.dims
            ]
        return self.replace(stays=tuple(sorted(others, key=lambda one: one.place)))

    def moves(self, group: MoveGroup) -> bool:
        """Whether activations move to a group, on the ranks of the group."""
        return self.moves_on(group) == group.decision

    def moves_on(self, group: MoveGroup) -> Decision | None:
        """The decision on a group's weights while activations move to them; None: they do not."""
        return next((one.decision for one in self.stays if one.name in group.dims), None)

    def chunks_of(self, group: MoveGroup) -> int:
        """The chunks in which activations move to a group; 1: whole, or they do not."""
        return next((one.chunks for one in self.stays if one.name in group.dims), 1)

    def deciding(self, changes: Iterable[tuple[int, Decision]], ctx: Context) -> Candidate:
        """The same with other decisions for some parameters, by index.

        Only regathered weights keep some of their slices.
        """
        decisions = list(self.decisions)
        for index, decision in changes:
            decisions[index] = decision
        if not any(one.kept_slices for one in self.splits):
            return self.replace(decisions=tuple(decisions))
        by_name = _by_name(decisions, ctx)
        splits = (
            one if by_name[one.name].regathers else one._replace(kept_slices=0)
            for one in self.splits
        )
        return self.replace(decisions=tuple(decisions), splits=tuple(splits))

    def slicing(
        self, slice_group: SliceGroup, slices: int, kept: int | None, ctx: Context
    ) -> Candidate:
        """The same with a slice group in this number of slices; 1: whole.

        ``kept``: the number of slices that each layer keeps gathered; the others are regathered
        (:meth:`SliceGroup.keeping`). None: the decisions on the weights stay. They also stay if
        the rows of the input are sliced.
        """
        others = [one for one in self.splits if one.name not in slice_group.names]
        if slices == 1:
            return self.replace(splits=tuple(others))
        split = slice_group.into(slices)
        decisions = list(self.decisions)
        if kept is not None and not slice_group.of_input:
            keeping = slice_group.keeping(slices, kept)
            for index, one in enumerate(ctx.parameters):
                if one.name in keeping:
                    whole = keeping[one.name] == slices
                    scope = decisions[index].scope if decisions[index].sharded else Scope.ALL
                    decisions[index] = Decision(scope, keep=whole)
            split = tuple(one._replace(kept_slices=keeping[one.name] % slices) for one in split)
        again = [name for name in slice_group.recompute if name not in self.recompute]
        return self.replace(
            decisions=tuple(decisions),
            recompute=(*self.recompute, *again),
            splits=tuple(sorted([*others, *split])),
        )

    def slices_of(self, slice_group: SliceGroup, ctx: Context) -> tuple[int, int | None]:
        """The number of slices of a slice group, and the number that each layer keeps gathered.

        The latter is None if the group is whole, if a weight is replicated, or if the rows of the
        input are sliced.
        """
        own = {(one.name, one.along): one for one in self.splits}
        places = [(name, along) for name, along, _ in slice_group.layers[0].along]
        if not all(place in own for place in places):
            return 1, None
        split = [own[place] for place in places]
        by_name = _by_name(self.decisions, ctx)
        if slice_group.of_input or not all(by_name[one.name].sharded for one in split):
            return split[0].slices, None
        kept = (one.slices if by_name[one.name].keep else one.kept_slices for one in split)
        return split[0].slices, sum(kept)


def _by_name(decisions: Sequence[Decision], ctx: Context) -> dict[str, Decision]:
    return dict(zip((one.name for one in ctx.parameters), decisions, strict=True))


def rows_of(
    ctx: Context,
    decisions: Sequence[Decision],
    splits: Sequence[Split] = (),
    stays: Sequence[Stays] = (),
) -> tuple[ParameterPlan, ...]:
    """The rows of a plan, with the state bytes that each decision saves between steps."""
    sliced = {one.name: one for one in splits}
    by_name = {one.name: one for one in stays}
    rows = []
    for p, decision in zip(ctx.parameters, decisions, strict=True):
        split = sliced.get(p.name, Split(p.name, 1))
        stays_as = by_name.get(p.name)
        dim = 0 if stays_as is None else stays_as.dim
        saved_bytes = p.state_bytes(1) - p.state_bytes(ctx.cut(decision).ranks, dim)
        rows.append(
            ParameterPlan(
                **split._asdict(),
                shape=p.shape,
                dtype=p.dtype,
                decision=decision,
                saved_bytes=saved_bytes,
                moves=Moves.WEIGHT if stays_as is None else Moves.ACTIVATIONS,
                dim=dim,
                chunks=1 if stays_as is None else stays_as.chunks,
                alone=stays_as is not None and stays_as.alone,
            )
        )
    return tuple(rows)
