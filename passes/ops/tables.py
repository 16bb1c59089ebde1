"""Tables: operators on the tokens of all ranks, and of embeddings whose rows the ranks share.

================  ==========================================================================
``tokens_of``     a gathered flat tensor -> the tokens, each of the shape ``inner``
``take_rows``     ids of all tokens -> their rows of this rank's part of the table, else zeros
``put_rows``      ids and gradients of all tokens -> the gradient of this rank's part
``take_bags``     ids of all tokens in bags -> the sums of bags over this rank's part of the table
``put_bags``      the same ids, and gradients of bags -> the gradient of this rank's part
``take_columns``  this rank's columns of a table, an id a row -> the row's element, else zero
================  ==========================================================================

``sent``: not read; it keeps the input of a P2P collective unchanged (``passes/ops/p2p.py``).
``offsets``: the first id of each bag among its rank's ids; ``ranks``: their number. ``mean``: sums
are divided by the numbers of ids.
``start``: the first row or column of this rank's part. ``total``: those of the whole table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from passes._torch import assert_async

_LIBRARY = torch.library.Library("osdp", "FRAGMENT")
_LIBRARY.define("tokens_of(Tensor gathered, int[] inner, Tensor? sent=None) -> Tensor")
_LIBRARY.define("take_rows(Tensor table, Tensor ids, int start, int total) -> Tensor")
_LIBRARY.define(
    "take_bags(Tensor table, Tensor ids, Tensor offsets, int ranks, int start, int total,"
    " bool mean) -> Tensor"
)
_LIBRARY.define(
    "put_bags(Tensor ids, Tensor offsets, Tensor values, int ranks, int start, int rows,"
    " bool mean) -> Tensor"
)
_LIBRARY.define("take_columns(Tensor table, Tensor ids, int start, int total) -> Tensor")
_LIBRARY.define("put_rows(Tensor ids, Tensor values, int start, int rows) -> Tensor")


@torch.library.register_fake("osdp::tokens_of")
def _tokens_of_shape(gathered: Tensor, inner: list[int], sent: Tensor | None = None) -> Tensor:
    return gathered.new_empty([gathered.shape[0] // math.prod(inner), *inner])


@torch.library.impl("osdp::tokens_of", "CompositeExplicitAutograd")
def _tokens_of(gathered: Tensor, inner: list[int], sent: Tensor | None = None) -> Tensor:
    return gathered.view(-1, *inner).clone()


@torch.library.register_fake("osdp::take_rows")
def _take_rows_shape(table: Tensor, ids: Tensor, start: int, total: int) -> Tensor:
    return table.new_empty([*ids.shape, *table.shape[1:]])


@torch.library.impl("osdp::take_rows", "CompositeExplicitAutograd")
def _take_rows(table: Tensor, ids: Tensor, start: int, total: int) -> Tensor:
    _check_ids(ids, total)
    own = (ids >= start) & (ids < start + table.shape[0])
    rows: Tensor = torch.nn.functional.embedding(torch.where(own, ids - start, 0), table)
    return rows.mul_(own.unsqueeze(-1))


def _check_ids(ids: Tensor, total: int) -> None:
    inside = (ids >= 0) & (ids < total)
    if ids.device.type == "cpu" and not bool(inside.all()):
        raise IndexError("index out of range in self")  # as aten.embedding says
    assert_async(inside.all())


@torch.library.register_fake("osdp::take_columns")
def _take_columns_shape(table: Tensor, ids: Tensor, start: int, total: int) -> Tensor:
    return table.new_empty(ids.shape)


@torch.library.impl("osdp::take_columns", "CompositeExplicitAutograd")
def _take_columns(table: Tensor, ids: Tensor, start: int, total: int) -> Tensor:
    _check_ids(ids, total)
    own = (ids >= start) & (ids < start + table.shape[1])
    return table.gather(1, torch.where(own, ids - start, 0)).masked_fill_(~own, 0)


@torch.library.register_fake("osdp::put_rows")
def _put_rows_shape(ids: Tensor, values: Tensor, start: int, rows: int) -> Tensor:
    return values.new_empty([rows, *values.shape[ids.dim() :]])


@torch.library.impl("osdp::put_rows", "CompositeExplicitAutograd")
def _put_rows(ids: Tensor, values: Tensor, start: int, rows: int) -> Tensor:
    own = ((ids >= start) & (ids < start + rows)).flatten()
    width = values.shape[ids.dim() :]
    made = values.new_zeros([rows, *width])
    chosen = values.reshape(-1, *width)[own]
    return made.index_add_(0, ids.flatten()[own] - start, chosen)


@torch.library.register_fake("osdp::take_bags")
def _take_bags_shape(
    table: Tensor, ids: Tensor, offsets: Tensor, ranks: int, start: int, total: int, mean: bool
) -> Tensor:
    return table.new_empty([offsets.shape[0], table.shape[1]])


@torch.library.impl("osdp::take_bags", "CompositeExplicitAutograd")
def _take_bags(
    table: Tensor, ids: Tensor, offsets: Tensor, ranks: int, start: int, total: int, mean: bool
) -> Tensor:
    _check_ids(ids, total)
    own = (ids >= start) & (ids < start + table.shape[0])
    bags, sizes = _bags(ids, offsets, ranks)
    made = table.new_zeros([offsets.shape[0], table.shape[1]])
    made.index_add_(0, bags[own], table[ids[own] - start])
    return made.div_(sizes.clamp(min=1).unsqueeze(1)) if mean else made


def _bags(ids: Tensor, offsets: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The bag of each id, and the number of ids of each bag."""
    length = ids.shape[0] // ranks
    first = offsets.view(ranks, -1)
    last = torch.cat((first[:, 1:], first.new_full([ranks, 1], length)), 1)
    sizes = (last - first).flatten()
    bags = torch.arange(len(sizes), device=ids.device)
    return bags.repeat_interleave(sizes, output_size=ids.shape[0]), sizes


@torch.library.register_fake("osdp::put_bags")
def _put_bags_shape(
    ids: Tensor, offsets: Tensor, values: Tensor, ranks: int, start: int, rows: int, mean: bool
) -> Tensor:
    return values.new_empty([rows, values.shape[1]])


@torch.library.impl("osdp::put_bags", "CompositeExplicitAutograd")
def _put_bags(
    ids: Tensor, offsets: Tensor, values: Tensor, ranks: int, start: int, rows: int, mean: bool
) -> Tensor:
    own = (ids >= start) & (ids < start + rows)
    bags, sizes = _bags(ids, offsets, ranks)
    if mean:
        values = values / sizes.clamp(min=1).unsqueeze(1)
    made = values.new_zeros([rows, values.shape[1]])
    return made.index_add_(0, ids[own] - start, values[bags[own]])


TOKENS_OF = torch.ops.osdp.tokens_of.default
TAKE_ROWS = torch.ops.osdp.take_rows.default
TAKE_COLUMNS = torch.ops.osdp.take_columns.default
TAKE_BAGS = torch.ops.osdp.take_bags.default
PUT_BAGS = torch.ops.osdp.put_bags.default
PUT_ROWS = torch.ops.osdp.put_rows.default
TABLES = frozenset({TOKENS_OF, TAKE_ROWS, TAKE_COLUMNS, PUT_ROWS, TAKE_BAGS, PUT_BAGS})
