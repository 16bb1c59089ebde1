"""Slicing: operators that take, join, pad and trim the slices of a dimension.

The shard layout of a parameter (``passes/types/shard_layout.py``) gives each rank at most R rows.
Slice j of g consists of the j-th S = ceil(R / g) rows of *every* rank, in rank order. So each
rank sends contiguous rows, and the gathered slice needs no reordering. In the full parameter, a
slice is one strip of every rank's rows. Other tensors with the same dimension (the operator's
output, the columns of the next operator's weight) have the same strips. The slices of a
dimension that is not sharded are contiguous (``ranks=1``).

If S does not divide R, or some ranks have fewer than R rows, a slice has fewer than S rows of some
ranks. Shards are then padded to S rows before the gather, and the gathered slice is trimmed.

===============  ==========================================================================
``take_slice``   a tensor -> slice ``index`` of ``count`` of one dimension
``join_slices``  all slices of a dimension -> the whole tensor
``take_part``    a shard -> ``size`` of its rows from ``start``, zeros below
``trim_slice``   a gathered slice, S rows of every rank -> the slice without padding
``pad_slice``    a slice's gradient -> S rows for every rank, zeros below
===============  ==========================================================================

All results are contiguous and newly allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from passes.types.shard_layout import ShardLayout

_LIBRARY = torch.library.Library("osdp", "FRAGMENT")
_LIBRARY.define(
    "take_slice(Tensor whole, int dim, int count, int index, int ranks=1, int hosts=1) -> Tensor"
)
_LIBRARY.define(
    "join_slices(Tensor[] slices, int dim, int size, int ranks=1, int hosts=1) -> Tensor"
)
_LIBRARY.define("take_part(Tensor shard, int start, int size) -> Tensor")
_OF_SLICE = "int size, int count, int index, int ranks=1, int hosts=1) -> Tensor"
_LIBRARY.define(f"trim_slice(Tensor padded, {_OF_SLICE}")
_LIBRARY.define(f"pad_slice(Tensor trimmed, {_OF_SLICE}")


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of a dimension.

    ``size``: size of the whole dimension. ``count``: number of slices; none is empty
    (:func:`cut_into`). ``ranks``, ``hosts``: the shard layout that gives the strips.
    """

    size: int
    count: int
    ranks: int = 1
    hosts: int = 1

    @property
    def strip(self) -> int:
        """Largest number of elements of one rank in a slice: S."""
        return math.ceil(math.ceil(self.size / self.ranks) / self.count)

    @property
    def even(self) -> bool:
        """Whether every slice has S elements of every rank."""
        return self.ranks * self.strip * self.count == self.size

    def part(self, index: int) -> int:
        """Number of elements of a slice along the dimension."""
        return sum(count for _, count in self.strips(index))

    def to_take(self, whole: fx.Node, dim: int, index: int) -> tuple[fx.Node | int, ...]:
        """Arguments of ``take_slice`` for one slice of a tensor."""
        return whole, dim, self.count, index, self.ranks, self.hosts

    def to_join(self, slices: Sequence[fx.Node], dim: int) -> tuple[list[fx.Node] | int, ...]:
        """Arguments of ``join_slices`` for all slices."""
        return list(slices), dim, self.size, self.ranks, self.hosts

    def to_cut(self, one: fx.Node, index: int) -> tuple[fx.Node | int, ...]:
        """Arguments of ``trim_slice`` and ``pad_slice`` for one slice."""
        return one, self.size, self.count, index, self.ranks, self.hosts

    def strips(self, index: int) -> Iterator[tuple[int, int]]:
        """The strips of a slice, by rank: (first element in the whole dimension, element count)."""
        for place in range(self.ranks):
            start, stop = ShardLayout(self.ranks, place, "", self.hosts).rows(self.size)
            first = min(start + index * self.strip, stop)
            yield first, min(self.strip, stop - first)


def cut_into(size: int, count: int, ranks: int = 1, hosts: int = 1) -> Slices:
    """``count`` slices, or fewer so that none is empty."""
    rows = math.ceil(size / ranks)
    return Slices(size, math.ceil(rows / math.ceil(rows / count)), ranks, hosts)


def slice_name(name: str, index: int) -> str:
    """The name of a parameter's slice in collectives: ``up.weight#2``."""
    return f"{name}#{index}"


def parameter_of(name: str) -> str:
    """The parameter's name for a slice's name; any other name is returned unchanged."""
    return name.rpartition("#")[0] or name


def _sized(like: Tensor, dim: int, size: int) -> Tensor:
    """An empty tensor like another, with a different size along ``dim``."""
    return like.new_empty([*like.shape[:dim], size, *like.shape[dim + 1 :]])


@torch.library.register_fake("osdp::take_slice")
def _take_slice_shape(
    whole: Tensor, dim: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    return _sized(whole, dim, Slices(int(whole.shape[dim]), count, ranks, hosts).part(index))


@torch.library.impl("osdp::take_slice", "CompositeExplicitAutograd")
def _take_slice(
    whole: Tensor, dim: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    slices = Slices(whole.shape[dim], count, ranks, hosts)
    if slices.even:
        strips = whole.unflatten(dim, (ranks, count, slices.strip)).select(dim + 1, index)
        part: Tensor = strips.clone(memory_format=torch.contiguous_format)
        return part.flatten(dim, dim + 1)
    return torch.cat([whole.narrow(dim, *strip) for strip in slices.strips(index)], dim)


@torch.library.register_fake("osdp::join_slices")
def _join_slices_shape(
    slices: Sequence[Tensor], dim: int, size: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    return _sized(slices[0], dim, size)


@torch.library.impl("osdp::join_slices", "CompositeExplicitAutograd")
def _join_slices(
    slices: Sequence[Tensor], dim: int, size: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    cut = Slices(size, len(slices), ranks, hosts)
    if cut.even:
        strips = [one.unflatten(dim, (ranks, cut.strip)) for one in slices]
        return torch.stack(strips, dim + 1).flatten(dim, dim + 2)
    joined = _sized(slices[0], dim, size)
    for index, one in enumerate(slices):
        place = 0
        for first, count in cut.strips(index):
            joined.narrow(dim, first, count).copy_(one.narrow(dim, place, count))
            place += count
    return joined


@torch.library.register_fake("osdp::take_part")
def _take_part_shape(shard: Tensor, start: int, size: int) -> Tensor:
    return _sized(shard, 0, size)


@torch.library.impl("osdp::take_part", "CompositeExplicitAutograd")
def _take_part(shard: Tensor, start: int, size: int) -> Tensor:
    part = shard.new_zeros([size, *shard.shape[1:]])
    there = shard[start : start + size]
    part[: len(there)] = there
    return part


@torch.library.register_fake("osdp::trim_slice")
def _trim_slice_shape(
    padded: Tensor, size: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    return _sized(padded, 0, Slices(size, count, ranks, hosts).part(index))


@torch.library.impl("osdp::trim_slice", "CompositeExplicitAutograd")
def _trim_slice(
    padded: Tensor, size: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    slices = Slices(size, count, ranks, hosts)
    rows = padded.unflatten(0, (ranks, slices.strip))
    return torch.cat([one[:n] for one, (_, n) in zip(rows, slices.strips(index), strict=True)])


@torch.library.register_fake("osdp::pad_slice")
def _pad_slice_shape(
    trimmed: Tensor, size: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    return _sized(trimmed, 0, ranks * Slices(size, count, ranks, hosts).strip)


@torch.library.impl("osdp::pad_slice", "CompositeExplicitAutograd")
def _pad_slice(
    trimmed: Tensor, size: int, count: int, index: int, ranks: int = 1, hosts: int = 1
) -> Tensor:
    slices = Slices(size, count, ranks, hosts)
    padded = trimmed.new_zeros([ranks, slices.strip, *trimmed.shape[1:]])
    counts = [n for _, n in slices.strips(index)]
    for place, rows in enumerate(trimmed.split(counts)):
        padded[place, : len(rows)] = rows
    return padded.flatten(0, 1)


TAKE_SLICE = torch.ops.osdp.take_slice.default
JOIN_SLICES = torch.ops.osdp.join_slices.default
TAKE_PART = torch.ops.osdp.take_part.default
TRIM_SLICE = torch.ops.osdp.trim_slice.default
PAD_SLICE = torch.ops.osdp.pad_slice.default
SLICING = frozenset({TAKE_SLICE, JOIN_SLICES, TAKE_PART, TRIM_SLICE, PAD_SLICE})
