"""Packing: operators that pack tensors for collectives and unpack the results.

Each operator copies or sums once, in precompiled kernels. In aten operators, Inductor would
compile a new kernel for every size, which takes seconds on a CPU. With N ranks:

================  =========================================================================
``pack``          tensors -> all their elements, one after the other
``pack_columns``  full gradients -> a table of N rows; row r holds the parts of rank r
``unpack``        a gathered table of N rows -> the full tensor in some of its columns
``mean_ranks``    N ranks' parts, one after the other -> their mean
``sum_ranks``     N ranks' parts, one after the other -> their sum
``max_ranks``     N ranks' parts, one after the other -> their largest elements
``first_of``      a flat tensor -> its first elements (removes an all-reduce's padding)
``pad_rows``      local shard -> ``rows`` rows, zeros below (when N does not divide the rows)
``trim_rows``     padded gradient shard -> the rows of this rank's shard
================  =========================================================================

A rank's part of a tensor is ``ceil(rows / N)`` of its rows; the last ranks' parts are padded
with zeros. A tensor without dimensions has one row. All results are contiguous and newly
allocated.
``hosts``: rows are divided among this many hosts first (``passes/types/shard_layout.py``), so the
last ranks of every host may have padding.
``sent``: not read; it keeps the input of a P2P collective unchanged (``passes/ops/p2p.py``).
``inner``: inner size of a two-dimensional mesh (``passes/overlap/hierarchical_collectives.py``);
the row of rank ``h * inner + g`` in the table is then ``g * N / inner + h``.
``copies``: number of such means that are summed later; each mean is divided by it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from passes.ops.slicing import SLICING, TAKE_PART, TAKE_SLICE, TRIM_SLICE
from passes.ops.tables import TABLES, TAKE_BAGS, TAKE_COLUMNS, TAKE_ROWS

_LIBRARY = torch.library.Library("osdp", "FRAGMENT")
_LIBRARY.define("pack(Tensor[] tensors) -> Tensor")
_LIBRARY.define("pack_columns(Tensor[] tensors, int ranks, int inner=1, int hosts=1) -> Tensor")
_LIBRARY.define(
    "unpack(Tensor packed, int ranks, int start, int[] shape, Tensor? sent=None, int inner=1,"
    " int hosts=1) -> Tensor"
)
_LIBRARY.define("mean_ranks(Tensor parts, int ranks, Tensor? sent=None, int copies=1) -> Tensor")
_LIBRARY.define("sum_ranks(Tensor parts, int ranks, Tensor? sent=None) -> Tensor")
_LIBRARY.define("max_ranks(Tensor parts, int ranks, Tensor? sent=None) -> Tensor")
_LIBRARY.define("first_of(Tensor padded, int numel, Tensor? sent=None) -> Tensor")
_LIBRARY.define("pad_rows(Tensor shard, SymInt rows) -> Tensor")
_LIBRARY.define("trim_rows(Tensor padded, Tensor like) -> Tensor")


def part_numel(shape: Sequence[int], ranks: int) -> int:
    """Elements of one rank's part of a tensor; ``shape``: full shape. Includes padding."""
    if not shape:
        return 1
    return -(-shape[0] // ranks) * math.prod(shape[1:])


@torch.library.register_fake("osdp::pack")
def _pack_shape(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty([sum(t.numel() for t in tensors)])


@torch.library.impl("osdp::pack", "CompositeExplicitAutograd")
def _pack(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.library.register_fake("osdp::pack_columns")
def _pack_columns_shape(
    tensors: list[Tensor], ranks: int, inner: int = 1, hosts: int = 1
) -> Tensor:
    return tensors[0].new_empty([ranks * sum(part_numel(t.shape, ranks) for t in tensors)])


@torch.library.impl("osdp::pack_columns", "CompositeExplicitAutograd")
def _pack_columns(tensors: list[Tensor], ranks: int, inner: int = 1, hosts: int = 1) -> Tensor:
    packed: Tensor = _pack_columns_shape(tensors, ranks, inner, hosts)
    table = _by_rank(packed, ranks, inner, hosts)
    start = 0
    for tensor in tensors:
        numel = part_numel(tensor.shape, ranks)
        columns = table[:, :, start : start + numel]
        if numel:
            whole, of_host, _ = _shares(tensor.shape, columns, hosts)
            columns[:whole, of_host // numel :] = 0
            columns[whole:] = 0
            for elements, place in _places(tensor.reshape(-1), tensor.shape, columns, hosts):
                place.copy_(elements)
        start += numel
    return packed


def _by_rank(table: Tensor, ranks: int, inner: int, hosts: int = 1) -> Tensor:
    """A view ``[h, g, elements]`` of a flat table: the row of rank ``h * G + g``.

    G, the ranks of a host, is ``inner``, or ``ranks / hosts`` if only ``hosts`` is above 1.
    """
    if inner == 1 and hosts > 1:
        return table.view(hosts, ranks // hosts, -1)
    return table.view(inner, ranks // inner, -1).transpose(0, 1)


def _shares(shape: Sequence[int], columns: Tensor, hosts: int) -> tuple[int, int, int]:
    """(Hosts with the most elements, elements of each, elements per rank of the next host)."""
    _, ranks, numel = columns.shape
    if hosts == 1:
        return math.prod(shape) // (ranks * numel), ranks * numel, numel
    rows, row = -(-shape[0] // hosts), math.prod(shape[1:])
    whole = shape[0] // rows
    return whole, rows * row, -(-(shape[0] - whole * rows) // ranks) * row


def _places(
    flat: Tensor, shape: Sequence[int], columns: Tensor, hosts: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views of equal shape: a tensor's elements, and their places in a table.

    ``flat``: elements of a tensor of this shape. ``columns``: its columns of the table,
    ``[h, g, elements of a part]``.
    """
    whole, of_host, of_rank = _shares(shape, columns, hosts)
    blocks = [(flat[: whole * of_host].view(whole, of_host), columns[:whole], columns.shape[2])]
    if whole < len(columns):
        blocks.append((flat[whole * of_host :], columns[whole], of_rank))
    for elements, block, each in blocks:
        full = elements.shape[-1] // each if each else 0  # ranks without padding
        yield elements[..., : full * each].unflatten(-1, (full, each)), block[..., :full, :each]
        if full < block.shape[-2]:
            rest = elements[..., full * each :]
            yield rest, block[..., full, : rest.shape[-1]]


@torch.library.register_fake("osdp::unpack")
def _unpack_shape(
    packed: Tensor,
    ranks: int,
    start: int,
    shape: list[int],
    sent: Tensor | None = None,
    inner: int = 1,
    hosts: int = 1,
) -> Tensor:
    return packed.new_empty(shape)


@torch.library.impl("osdp::unpack", "CompositeExplicitAutograd")
def _unpack(
    packed: Tensor,
    ranks: int,
    start: int,
    shape: list[int],
    sent: Tensor | None = None,
    inner: int = 1,
    hosts: int = 1,
) -> Tensor:
    numel = part_numel(shape, ranks)
    columns = _by_rank(packed, ranks, inner, hosts)[:, :, start : start + numel]
    if hosts > 1 and numel * ranks != math.prod(shape):
        full = packed.new_empty(shape)
        for elements, place in _places(full.view(-1), shape, columns, hosts):
            elements.copy_(place)
        return full
    whole = columns.clone(memory_format=torch.contiguous_format)
    return whole.view(-1)[: math.prod(shape)].view(shape)


@torch.library.register_fake("osdp::max_ranks")
@torch.library.register_fake("osdp::sum_ranks")
@torch.library.register_fake("osdp::mean_ranks")
def _one_part_shape(
    parts: Tensor, ranks: int, sent: Tensor | None = None, copies: int = 1
) -> Tensor:
    return parts.new_empty([parts.numel() // ranks])


@torch.library.impl("osdp::mean_ranks", "CompositeExplicitAutograd")
def _mean_ranks(parts: Tensor, ranks: int, sent: Tensor | None = None, copies: int = 1) -> Tensor:
    table = parts.view(ranks, -1)
    if parts.element_size() < 4:  # torch accumulates in float32
        mean = table.mean(0)
        return mean if copies == 1 else mean.mul_(1.0 / copies)
    return _sum_of(table).mul_(1.0 / (ranks * copies))


@torch.library.impl("osdp::sum_ranks", "CompositeExplicitAutograd")
def _sum_ranks(parts: Tensor, ranks: int, sent: Tensor | None = None) -> Tensor:
    table = parts.view(ranks, -1)
    return table.sum(0) if parts.element_size() < 4 else _sum_of(table)


@torch.library.impl("osdp::max_ranks", "CompositeExplicitAutograd")
def _max_ranks(parts: Tensor, ranks: int, sent: Tensor | None = None) -> Tensor:
    return parts.view(ranks, -1).amax(0)


def _sum_of(table: Tensor) -> Tensor:
    """The sum of at least two rows, in row order."""
    total = table[0] + table[1]
    for part in table[2:]:
        total += part
    return total


@torch.library.register_fake("osdp::first_of")
def _first_of_shape(padded: Tensor, numel: int, sent: Tensor | None = None) -> Tensor:
    return padded.new_empty([numel])


@torch.library.impl("osdp::first_of", "CompositeExplicitAutograd")
def _first_of(padded: Tensor, numel: int, sent: Tensor | None = None) -> Tensor:
    return padded[:numel].clone()


@torch.library.register_fake("osdp::pad_rows")
def _pad_rows_shape(shard: Tensor, rows: int) -> Tensor:
    return shard.new_empty([rows, *shard.shape[1:]])


@torch.library.impl("osdp::pad_rows", "CompositeExplicitAutograd")
def _pad_rows(shard: Tensor, rows: int) -> Tensor:
    padded = shard.new_zeros([rows, *shard.shape[1:]])
    padded[: shard.shape[0]] = shard
    return padded


@torch.library.register_fake("osdp::trim_rows")
def _trim_rows_shape(padded: Tensor, like: Tensor) -> Tensor:
    return padded.new_empty([like.shape[0], *padded.shape[1:]])


@torch.library.impl("osdp::trim_rows", "CompositeExplicitAutograd")
def _trim_rows(padded: Tensor, like: Tensor) -> Tensor:
    return padded[: like.shape[0]].clone()


PACK = torch.ops.osdp.pack.default
PACK_COLUMNS = torch.ops.osdp.pack_columns.default
UNPACK = torch.ops.osdp.unpack.default
MEAN_RANKS = torch.ops.osdp.mean_ranks.default
SUM_RANKS = torch.ops.osdp.sum_ranks.default
MAX_RANKS = torch.ops.osdp.max_ranks.default
FIRST_OF = torch.ops.osdp.first_of.default
PAD_ROWS = torch.ops.osdp.pad_rows.default
TRIM_ROWS = torch.ops.osdp.trim_rows.default
PACKING = (
    SLICING
    | TABLES
    | {
        PACK,
        PACK_COLUMNS,
        UNPACK,
        MEAN_RANKS,
        SUM_RANKS,
        MAX_RANKS,
        FIRST_OF,
        PAD_ROWS,
        TRIM_ROWS,
    }
)
#: Operators that read only as many bytes of their first argument as they write.
PICKING = frozenset(
    {
        UNPACK,
        FIRST_OF,
        TRIM_ROWS,
        TAKE_SLICE,
        TAKE_PART,
        TRIM_SLICE,
        TAKE_ROWS,
        TAKE_COLUMNS,
        TAKE_BAGS,
    }
)
