"""Bags: tables of ``EmbeddingBag`` whose rows the ranks share.

Each rank sums the rows that it has for the bags of all ranks: a partial sum. In the backward the
gradients of all bags are gathered, and each rank adds those of its rows. Bags of sums and of means,
without weights of their ids and without a padding id. Nothing reads the other results of such bags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.graph.fx_utils import always_equal
from passes.move.layouts import element_of
from passes.move.placed import PartialSum, Placed
from passes.move.spread import named
from passes.move.token_collectives import all_tokens
from passes.ops.tables import PUT_BAGS, TAKE_BAGS
from passes.split.split_rules import arguments_of

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
BAGS = _aten._embedding_bag.default
PUT_IN_BAGS = _aten._embedding_bag_backward.default
_SUM, _MEAN = 0, 1


def bagged(mover: Mover, node: fx.Node) -> Placed | None:
    """The partial sums of the bags of all ranks; None: another table, or bags of another kind."""
    options = _options(node, 3, ("scale", "mode", "sparse", "weights", "last", "padding"))
    table, ids, offsets = arguments_of(node)[:3]
    found = mover.placed.get(table)
    if found is None or not found.is_weight or found.features != 0 or not _is_plain(options):
        return None
    if any(user.args[1] and set(user.users) - {mover.output} for user in node.users):
        return None  # the bags of ids are read here too
    total = table.meta["val"].shape[0]
    start, _ = mover.layout.rows(total)
    everything = _of_all(mover, node, ids, offsets, found.names)
    args = (found.node, *everything, mover.ranks, start, total)
    return found.of(mover.emit(TAKE_BAGS, (*args, options.get("mode", _SUM) == _MEAN)))


def element(mover: Mover, node: fx.Node) -> Placed | PartialSum | fx.Node:
    """A tensor of several: of one placement, or of bags.

    The first tensor of bags is their partial sum. The others become zeros.
    """
    source, index = arguments_of(node)
    if source.target is not BAGS:
        return element_of(mover, node)
    if index == 0:
        found = mover.placed[source]
        return PartialSum(found.node, tuple(mover.own_sizes(node)), (), found.names)
    value = node.meta["val"]
    for like in source.all_input_nodes[1:]:
        sizes, is_alike = like.meta["val"].shape, like.meta["val"].dtype == value.dtype
        is_alike = is_alike and len(sizes) == value.dim()
        if is_alike and all(map(always_equal, sizes, value.shape)):
            return mover.emit(_aten.mul.Tensor, (like, 0))
    if not all(isinstance(size, int) for size in value.shape):
        raise mover.refused(node, f"{named(source)} has symbolic sizes (dynamic=True)")
    return mover.zeros(list(value.shape), value)


def put_in_bags(mover: Mover, put: fx.Node, node: fx.Node, names: frozenset[str]) -> fx.Node | None:
    """The gradient of this rank's rows, of the local gradient of a table; None: of other bags.

    ``node``: the operator that reads it.
    """
    names_of = ("rows", "scale", "mode", "sparse", "weights", "padding")
    options = _options(put, 6, names_of)
    start, stop = mover.layout.rows(options.pop("rows"))
    if not _is_plain(options):
        return None
    gradient, ids, offsets = arguments_of(put)[:3]
    everything = _of_all(mover, node, ids, offsets, names)
    args = (*everything, all_tokens(mover, gradient, node, names), mover.ranks)
    is_mean = options.get("mode", _SUM) == _MEAN
    return mover.emit(PUT_BAGS, (*args, start, stop - start, is_mean))


def _options(node: fx.Node, first: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(names, node.args[first:], strict=False)), **node.kwargs}


def _is_plain(options: dict[str, Any]) -> bool:
    """Whether bags are sums or means of rows, as they are where no option is given."""
    if options.get("mode", _SUM) not in (_SUM, _MEAN) or options.get("weights") is not None:
        return False
    others = options.keys() - {"mode", "weights", "padding", "scale", "last", "sparse"}
    is_given = any(options.get(name) for name in ("scale", "last", "sparse"))
    return not others and not is_given and options.get("padding", -1) == -1


def _of_all(
    mover: Mover, node: fx.Node, ids: fx.Node, offsets: fx.Node, names: frozenset[str]
) -> tuple[fx.Node, fx.Node]:
    """The ids and the offsets of all ranks."""
    if ids.meta["val"].dim() != 1 or offsets.meta["val"].dim() != 1:
        raise mover.refused(node, "its ids are no list")
    return all_tokens(mover, ids, node, names), all_tokens(mover, offsets, node, names)
