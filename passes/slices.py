"""Slices: which part of a dimension a split operator works on at a time, and what cuts it out.

A parameter's rows lie on the ranks of its cut (``passes/cuts.py``), each holding R of them. Slice
j of g are the j-th S = ceil(R / g) rows of *every* rank, one rank after the other: so what each
rank sends of a slice is contiguous, and what is gathered needs no shuffle. Seen from the whole
parameter a slice is a strip of every rank's rows, and whatever else has that dimension (the
activation that the operator makes, the columns of the operator that takes it in) is cut into the
same strips. A dimension that nobody shares is cut for one rank: its slices are contiguous.

Slices all have the same size: where S does not divide R, or not every rank has R rows, the missing
ones are zeros.

==============  ===========================================================================
``take_slice``  a tensor -> slice ``index`` of ``count`` of one dimension, with its zeros
``join_slices``  all slices of a dimension -> the whole, without the zeros
``take_part``   a tensor -> ``size`` elements of a dimension from ``start``, zeros behind it
==============  ===========================================================================

All results are contiguous and newly allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from passes.cuts import Cut

_LIBRARY = torch.library.Library("osdp", "FRAGMENT")
_LIBRARY.define(
    "take_slice(Tensor whole, int dim, int count, int index, int ranks=1, int hosts=1) -> Tensor"
)
_LIBRARY.define(
    "join_slices(Tensor[] slices, int dim, int size, int ranks=1, int hosts=1) -> Tensor"
)
_LIBRARY.define("take_part(Tensor whole, int dim, int start, int size) -> Tensor")


@dataclasses.dataclass(frozen=True)
class Slices:
    """How a dimension is cut.

    ``size``: of the whole dimension. ``count``: of slices. ``ranks``, ``hosts``: of the cut that
    the strips are of.
    """

    size: int
    count: int
    ranks: int = 1
    hosts: int = 1

    @property
    def strip(self) -> int:
        """Elements that a slice has of every rank's: S."""
        return math.ceil(math.ceil(self.size / self.ranks) / self.count)

    @property
    def part(self) -> int:
        """Elements of a slice."""
        return self.ranks * self.strip

    @property
    def even(self) -> bool:
        """Whether no slice needs zeros."""
        return self.part * self.count == self.size

    def starts(self) -> Iterator[tuple[int, int]]:
        """First and last (exclusive) element of every rank."""
        for place in range(self.ranks):
            yield Cut(self.ranks, place, "", self.hosts).rows(self.size)


def slice_name(name: str, index: int) -> str:
    """What a slice of a parameter is called in collectives: ``up.weight#2``."""
    return f"{name}#{index}"


def parameter_of(name: str) -> str:
    """The parameter that a slice is of; any other name is its own."""
    return name.rpartition("#")[0] or name


@torch.library.register_fake("osdp::take_slice")
def _take_slice_shape(
    whole: Tensor, dim: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    shape = list(whole.shape)
    shape[dim] = Slices(int(shape[dim]), count, ranks, hosts).part
    return whole.new_empty(shape)


@torch.library.impl("osdp::take_slice", "CompositeExplicitAutograd")
def _take_slice(
    whole: Tensor, dim: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    slices = Slices(whole.shape[dim], count, ranks, hosts)
    strip = slices.strip
    if slices.even:
        strips = whole.unflatten(dim, (ranks, count, strip)).select(dim + 1, index)
        return strips.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)
    shape = list(whole.shape)
    shape[dim] = slices.part
    taken = whole.new_zeros(shape)
    for place, (start, stop) in enumerate(slices.starts()):
        first = min(start + index * strip, stop)
        count_here = min(strip, stop - first)
        taken.narrow(dim, place * strip, count_here).copy_(whole.narrow(dim, first, count_here))
    return taken


@torch.library.register_fake("osdp::join_slices")
def _join_slices_shape(
    slices: Sequence[Tensor], dim: int, size: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    shape = list(slices[0].shape)
    shape[dim] = size
    return slices[0].new_empty(shape)


@torch.library.impl("osdp::join_slices", "CompositeExplicitAutograd")
def _join_slices(
    slices: Sequence[Tensor], dim: int, size: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    cut = Slices(size, len(slices), ranks, hosts)
    if cut.even:
        strips = [one.unflatten(dim, (ranks, cut.strip)) for one in slices]
        return torch.stack(strips, dim + 1).flatten(dim, dim + 2)
    joined = _join_slices_shape(slices, dim, size, ranks, hosts)
    for place, (start, stop) in enumerate(cut.starts()):
        for index, one in enumerate(slices):
            first = min(start + index * cut.strip, stop)
            count_here = min(cut.strip, stop - first)
            strip = one.narrow(dim, place * cut.strip, count_here)
            joined.narrow(dim, first, count_here).copy_(strip)
    return joined


@torch.library.register_fake("osdp::take_part")
def _take_part_shape(whole: Tensor, dim: int, start: int, size: int) -> Tensor:
    shape = list(whole.shape)
    shape[dim] = size
    return whole.new_empty(shape)


@torch.library.impl("osdp::take_part", "CompositeExplicitAutograd")
def _take_part(whole: Tensor, dim: int, start: int, size: int) -> Tensor:
    shape = list(whole.shape)
    shape[dim] = size
    part = whole.new_zeros(shape)
    count = max(0, min(size, whole.shape[dim] - start))
    if count:
        part.narrow(dim, 0, count).copy_(whole.narrow(dim, start, count))
    return part


TAKE_SLICE = torch.ops.osdp.take_slice.default
JOIN_SLICES = torch.ops.osdp.join_slices.default
TAKE_PART = torch.ops.osdp.take_part.default
SLICING = frozenset({TAKE_SLICE, JOIN_SLICES, TAKE_PART})
