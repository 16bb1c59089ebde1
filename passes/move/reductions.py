"""Reductions: operators that read all tokens, or all features of a token.

Each rank has a slice of the features. A sum over tokens is a total. A sum over features is a
partial sum. A sum over both is a share. A sum over the features of experts is local after it.

``amax``: the ranks exchange the largest of their slices, and each gets those of its own tokens.
``gather`` of one feature a token, as in a cross-entropy: the rank that has it looks it up.
Pointwise operators between the features and the lookup run after it, on the values found::

    gather(log_softmax, 1, target)        reads  x - amax - log(sum)      [T, V]
    lookup(x, target) - amax - log(sum)   reads  x                        [N T, V/N]
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.graph.fx_utils import always_equal
from passes.graph.op_traits import is_pointwise
from passes.move.placed import PartialSum, Placed
from passes.move.spread import named
from passes.move.token_collectives import STACKS, all_tokens, combined
from passes.ops.packing import MAX_RANKS, SUM_RANKS
from passes.ops.tables import TAKE_COLUMNS
from passes.split.split_rules import arguments_of

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten


def summed(mover: Mover, node: fx.Node) -> Placed | PartialSum:
    """A sum, or a mean over other dimensions than tokens and features."""
    source, dims, *rest = arguments_of(node)
    found = mover.placed[source]
    rank = source.meta["val"].dim()
    over = {dim % rank for dim in dims}
    keeps = bool(rest and rest[0]) or bool(node.kwargs.get("keepdim"))
    tokens = None if found.tokens in over else found.tokens
    is_mean = node.target is _aten.mean.dim
    back = STACKS.get((rank, found.tokens, found.features))
    if back is not None and over == {2} and keeps and not is_mean:
        made = mover.emit(node.target, (found.node, *node.args[1:]), node.kwargs)
        return PartialSum(made, (), (), found.names, back)
    if not over or found.is_weight or (found.tokens not in (None, 0) and found.features in over):
        raise mover.refused(node, f"{named(node)} adds up the dimension that is sliced")
    if is_mean and over & {found.tokens, found.features}:
        raise mover.refused(node, f"{named(node)} is over tokens or over the sliced dimension")
    if found.features not in over:
        return _reduced(mover, node, found, over, keeps)
    made = mover.emit(node.target, (found.node, *node.args[1:]), node.kwargs)
    if tokens is None:
        return Placed(made, None, -1, found.names, is_share=True)
    return PartialSum(made, tuple(mover.own_sizes(node)), (), found.names)


def _reduced(mover: Mover, node: fx.Node, found: Placed, over: set[int], keeps: bool) -> Placed:
    """A reduction over other dimensions than features: a total, if it is over tokens.

    ``keeps``: the dimensions stay, of size one.
    """

    def kept(dim: int) -> int:
        return dim if keeps else dim - sum(one < dim for one in over)

    return dataclasses.replace(
        found,
        node=mover.emit(node.target, (found.node, *node.args[1:]), node.kwargs),
        tokens=None if found.tokens is None or found.tokens in over else kept(found.tokens),
        features=kept(found.features),
        is_total=found.is_total or found.tokens in over,
    )


def maximum(mover: Mover, node: fx.Node) -> Placed | fx.Node | None:
    """The largest feature of each own token, which is local; or the largest of other dimensions.

    None: tokens are reduced.
    """
    elsewhere = reduced(mover, node)
    if elsewhere is not None:
        return elsewhere
    source, dims, *_ = arguments_of(node)
    found = mover.placed[source]
    over = {dim % source.meta["val"].dim() for dim in dims}
    if found.tokens != 0 or found.heads or over != {found.features}:
        return None
    part = mover.emit(node.target, (found.node, *node.args[1:]), node.kwargs)
    return combined(mover, part, mover.own_sizes(node), found.names, MAX_RANKS)


def reduced(mover: Mover, node: fx.Node) -> Placed | None:
    """A reduction over other dimensions than tokens and features; None: over these."""
    source, dims, *rest = arguments_of(node)
    found, rank = mover.placed[source], source.meta["val"].dim()
    over = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    if found.is_total or not over.isdisjoint({found.tokens, found.features}):
        return None
    return _reduced(mover, node, found, over, bool(rest and rest[0]))


def looked_up(mover: Mover, node: fx.Node) -> fx.Node | None:
    """``gather`` of one feature of each own token; None: of other elements. It is local."""
    source, dim, index, *_ = arguments_of(node)
    found, sizes = mover.placed.get(source), index.meta["val"].shape
    if found is None or index in mover.placed or len(sizes) != 2 or node.kwargs:
        return None
    if (found.tokens, found.features, dim % 2) != (0, 1, 1) or not always_equal(sizes[1], 1):
        return None
    if not always_equal(sizes[0], source.meta["val"].shape[0]):
        return None
    source, later = _behind(mover, source)
    found = mover.placed[source]
    total = source.meta["val"].shape[1]
    start, _ = mover.layout.rows(total)
    ids = all_tokens(mover, index, node, found.names)
    part = mover.emit(TAKE_COLUMNS, (found.node, ids, start, total))
    value = combined(mover, part, mover.own_sizes(index), found.names, SUM_RANKS)
    for one, wide in reversed(later):
        inputs = {**{other: other for other in one.all_input_nodes}, wide: value}
        args, kwargs = fx.node.map_arg((one.args, one.kwargs), inputs.__getitem__)
        value = mover.emit(one.target, args, kwargs)
    return value


def _behind(mover: Mover, node: fx.Node) -> tuple[fx.Node, list[tuple[fx.Node, fx.Node]]]:
    """The tensor to look up in, and the pointwise operators after it, each with its wide input."""
    later, rows = [], node.meta["val"].shape[0]
    while is_pointwise(node):
        wide = [one for one in node.all_input_nodes if _is_wide(mover.placed.get(one))]
        others = [one for one in node.all_input_nodes if one not in wide]
        if len(wide) != 1 or any(not _is_column(mover, one) for one in others):
            break
        if node.meta["val"].dim() != 2 or not always_equal(node.meta["val"].shape[0], rows):
            break
        later.append((node, wide[0]))
        node = wide[0]
    return node, later


def _is_wide(found: Placed | None) -> bool:
    return found is not None and (found.tokens, found.features) == (0, 1)


def _is_column(mover: Mover, node: fx.Node) -> bool:
    """Whether a local tensor has the same values for all features."""
    sizes = node.meta["val"].shape
    if node in mover.placed:
        return False
    if len(sizes) == 0:
        return True
    return always_equal(sizes[-1], 1) and (len(sizes) == 2 or node in mover.constants)
