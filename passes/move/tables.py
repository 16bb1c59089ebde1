"""Tables: embeddings whose rows the ranks share.

A lookup takes the ids of all tokens. Each rank looks up those in its rows of the table: a partial
sum. The gradient of a table is a total: the local gradients are gathered, and each rank puts those
of its rows into a table of zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.graph.op_traits import COPIES
from passes.move.bags import PUT_IN_BAGS, put_in_bags
from passes.move.placed import PartialSum, Placed, Refused
from passes.move.spread import named
from passes.move.token_collectives import all_tokens
from passes.ops.markers import reduce_grad_of
from passes.ops.tables import PUT_ROWS, TAKE_ROWS
from passes.split.split_rules import arguments_of

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
_MASKED = _aten._unsafe_masked_index_put_accumulate.default
#: Put rows into a table. The result is linear in the rows.
PUTS = {_MASKED, _aten.index_put.default}


def embedded(mover: Mover, node: fx.Node) -> PartialSum:
    """Rows of the own part of a table for the ids of all tokens."""
    table, ids, *_ = arguments_of(node)
    found = mover.placed.get(table)
    if found is None or not found.is_weight or found.features != 0:
        raise mover.refused(node, f"{named(node)} reads a table that is not sliced by words")
    total = table.meta["val"].shape[0]
    start, _ = mover.layout.rows(total)
    everything = all_tokens(mover, _flat(mover, ids), node, found.names)
    args = (found.node, everything, start, total)
    sizes = (*_sizes_of(mover, ids), table.meta["val"].shape[1])
    return PartialSum(mover.emit(TAKE_ROWS, args), sizes, (), found.names)


def table_gradient(mover: Mover, node: fx.Node) -> fx.Node:
    """The total of a table's part, where local gradients are put into rows of zeros.

    ``node``: the marker of the gradient.
    """
    marker = reduce_grad_of(node)
    weight = Placed(node, None, 0, frozenset([marker.name]))
    if mover.dims[marker.name] != 0:
        reason = f"the gradient of {marker.name} is no product with tokens"
        raise Refused(reason, weight.names)
    return put_total(mover, marker.gradient, node, weight.names)


def put_total(mover: Mover, put: fx.Node, node: fx.Node, names: frozenset[str]) -> fx.Node:
    """This rank's rows of a table of zeros into which the local gradients of all are put.

    ``node``: the operator that reads it.
    """
    if put.target in COPIES:
        source: Any = put.args[0]
        made = put_total(mover, source, node, names)
        return mover.emit(put.target, (made, *put.args[1:]), put.kwargs)
    if put.target is PUT_IN_BAGS:
        found = put_in_bags(mover, put, node, names)
        if found is None:
            raise Refused("its bags are no sums or means", names)
        return found
    adds = put.target is _MASKED or (len(put.args) > 3 and put.args[3] is True)
    if put.target not in PUTS or not adds or put.meta["val"].dim() != 2:
        raise Refused(f"the gradient of {min(names)} is no product with tokens", names)
    table, *masks, indices, values = arguments_of(put)[: 4 if put.target is _MASKED else 3]
    if table.target is not _aten.full.default or table.args[1] != 0 or len(indices) != 1:
        raise Refused(f"the gradient of {min(names)} is put into another table", names)
    mover.meta = put.meta
    for mask in masks:
        zero = mover.zeros([], values.meta["val"])
        values = mover.emit(_aten.where.self, (mask, values, zero))
    ids = all_tokens(mover, _flat(mover, indices[0]), node, names)
    sizes = [-1, *values.meta["val"].shape[indices[0].meta["val"].dim() :]]
    tokens = mover.emit(_aten.reshape.default, (values, sizes))
    everything = all_tokens(mover, tokens, node, names)
    start, stop = mover.layout.rows(put.meta["val"].shape[0])
    return mover.emit(PUT_ROWS, (ids, everything, start, stop - start))


def _flat(mover: Mover, ids: fx.Node) -> fx.Node:
    """Ids as tokens without further dimensions."""
    if ids.meta["val"].dim() == 1:
        return ids
    if ids not in mover.flat_ids:
        mover.flat_ids[ids] = mover.emit(_aten.reshape.default, (ids, [-1]))
    return mover.flat_ids[ids]


def _sizes_of(mover: Mover, node: fx.Node) -> list[Any]:
    """A node's sizes as arguments: numbers, and nodes of symbolic ones."""
    return [
        size if isinstance(size, int) else mover.emit(_aten.sym_size.int, (node, dim))
        for dim, size in enumerate(node.meta["val"].shape)
    ]
