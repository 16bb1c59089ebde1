"""Products: ``mm`` and ``addmm`` of tokens and weights, of which each rank has a slice.

=====================================  ========================================================
local tokens, columns of a weight      the tokens are gathered; each rank has some features
features of tokens, rows of a weight   a partial sum
local tokens, features of tokens       the tokens are gathered; a total (a weight's gradient)
=====================================  ========================================================

A weight alone (``alone``) is a group by itself. The operators around its product need no rules.
With T tokens a rank and N ranks, x [T, d] and a weight of F columns:

====================================  =========================================================
columns, x                            x is gathered; the result [N T, F/N] returns in an
                                      all-to-all: [T, F]
rows, x                               an all-to-all gives this rank's features of all tokens,
                                      [N T, d/N]; a partial sum
the weight's gradient                 of the tokens of all ranks, gathered, and this rank's
                                      features of them
====================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.graph.op_traits import COPIES
from passes.move.placed import PartialSum, Placed, Refused
from passes.move.spread import named
from passes.move.token_collectives import all_tokens, features_of_all, own_tokens
from passes.ops.markers import REDUCE_GRAD, reduce_grad_of
from passes.split.origins import origin
from passes.split.split_rules import operands_of, permuted_dims

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten


def product(mover: Mover, node: fx.Node) -> Placed | PartialSum:
    """``mm`` and ``addmm``: see the cases below, with rows, columns and the inner dimension."""
    *bias, one, other = operands_of(node)
    left, right = mover.placed.get(one), mover.placed.get(other)
    if node.kwargs:
        raise mover.refused(node, f"{named(node)} has factors")
    if left and right and (left.features, right.features) == (1, 0):
        if left.tokens == 0 and right.is_weight:
            if any(one in mover.placed for one in bias):
                raise mover.refused(node, "the bias of the second product is sliced")
            part = mover.emit(_aten.mm.default, (left.node, right.node))
            sizes = (-1, node.meta["val"].shape[1])
            return PartialSum(part, sizes, tuple(bias), right.names)
    elif right and left is None and right.is_weight:
        if right.names <= mover.alone:
            return _alone(mover, node, one, right, bias)
        if right.features == 1:
            return _columns(mover, node, one, right, bias)
    elif left and right is None and (left.tokens, left.features) == (1, 0) and not bias:
        tokens = all_tokens(mover, other, node, left.names)
        made = mover.emit(node.target, (left.node, tokens))
        return Placed(made, None, 0, left.names, is_total=True)
    elif right and left is None and (right.tokens, right.features) == (0, 1) and not bias:
        turned = _all_tokens_turned(mover, one, node, right)
        made = mover.emit(node.target, (turned, right.node))
        return Placed(made, None, 1, right.names, is_total=True)
    raise mover.refused(node, f"{named(node)} has no rule", _missing(mover, node))


def _columns(
    mover: Mover, node: fx.Node, tokens: fx.Node, weight: Placed, bias: Sequence[fx.Node]
) -> Placed:
    """Tokens times the columns of a weight that this rank has."""
    names = weight.names
    own = []
    for one in bias:
        placed = mover.placed.get(one)
        if placed is None or not placed.is_weight:
            found = origin(one, 0)
            raise mover.refused(
                node, "its bias does not stay with its weight", [found] if found else ()
            )
        own.append(placed.node)
        names |= placed.names
    everything = all_tokens(mover, tokens, node, weight.names)
    made = mover.emit(node.target, (*own, everything, weight.node))
    return Placed(made, 0, 1, names)


def _alone(
    mover: Mover, node: fx.Node, tokens: fx.Node, weight: Placed, bias: Sequence[fx.Node]
) -> PartialSum:
    """Local tokens times a weight that is a group of its own; the result is local."""
    if any(one in mover.placed for one in bias):
        raise mover.refused(node, "the bias of a weight that stays alone is sliced")
    names, sizes = weight.names, (-1, node.meta["val"].shape[1])
    if weight.features == 1:
        everything = all_tokens(mover, tokens, node, names)
        part = mover.emit(_aten.mm.default, (everything, weight.node))
        return PartialSum(part, sizes, tuple(bias), names, own_tokens)
    own = features_of_all(mover, tokens, node, names)
    part = mover.emit(_aten.mm.default, (own, weight.node))
    return PartialSum(part, sizes, tuple(bias), names)


def lone_products(
    graph: fx.Graph, dims: Mapping[str, int], alone: Collection[str]
) -> dict[fx.Node, tuple[str, int]]:
    """The products that give gradients of weights alone: the weight, and the dimension to share.

    ``dims``: the dimension of each weight.
    """
    found: dict[fx.Node, tuple[str, int]] = {}
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD) if alone else ():
        marker = reduce_grad_of(node)
        if marker.name not in alone or marker.name not in dims:
            continue
        stack = [(marker.gradient, dims[marker.name])]
        while stack:
            source, dim = stack.pop()
            if source.target is _aten.mm.default:
                found[source] = marker.name, dim
            elif source.target is _aten.permute.default:
                stack.append((source.all_input_nodes[0], 1 - dim))
            elif source.target in COPIES or source.target is _aten.add.Tensor:
                stack += [(one, dim) for one in source.all_input_nodes]
    return found


def lone_product(mover: Mover, node: fx.Node) -> fx.Node:
    """A product of local tokens, as this rank's slice of it for the tokens of all ranks."""
    name, dim = mover.lone[node]
    names = frozenset([name])
    one, other = operands_of(node)
    if one in mover.placed or other in mover.placed:
        raise Refused(f"the gradient of {name} is a product of sliced tokens", names)
    source = _turned_back(mover, one)
    if dim == 0:
        left = features_of_all(mover, source, node, names)
        right = all_tokens(mover, other, node, names)
    else:
        left = all_tokens(mover, source, node, names)
        right = features_of_all(mover, other, node, names)
    turned = mover.emit(_aten.permute.default, (left, [1, 0]))
    return mover.emit(_aten.mm.default, (turned, right))


def lone_gradient(mover: Mover, node: fx.Node) -> fx.Node:
    """The total of the gradient of a weight alone: of its products, and what follows them.

    ``node``: the marker of the gradient.
    """
    marker = reduce_grad_of(node)

    def total(source: fx.Node) -> fx.Node:
        if source in mover.lone_totals:
            return mover.lone_totals[source]
        is_layout = source.target in COPIES or source.target is _aten.permute.default
        if not is_layout and source.target is not _aten.add.Tensor:
            reason = f"the gradient of {marker.name} is no product with tokens"
            raise Refused(reason, frozenset([marker.name]))
        args, kwargs = fx.node.map_arg((source.args, source.kwargs), total)
        return mover.emit(source.target, args, kwargs)

    return total(marker.gradient)


def _turned_back(mover: Mover, turned: fx.Node) -> fx.Node:
    """Tokens of which a matrix is the transpose."""
    if turned.target is _aten.permute.default and permuted_dims(turned) == [1, 0]:
        (source, *_) = turned.all_input_nodes
        return source
    return mover.emit(_aten.permute.default, (turned, [1, 0]))  # the forward saves the transpose


def _all_tokens_turned(mover: Mover, turned: fx.Node, node: fx.Node, placed: Placed) -> fx.Node:
    """The tokens of all ranks along the second dimension of a matrix."""
    source = _turned_back(mover, turned)
    everything = all_tokens(mover, source, node, placed.names)
    return mover.emit(_aten.permute.default, (everything, [1, 0]))


def _missing(mover: Mover, node: fx.Node) -> list[tuple[str, int]]:
    """The weights that would have to stay too: of matrices that are not placed."""
    local = [one for one in operands_of(node)[-2:] if one not in mover.placed]
    return [found for one in local if (found := origin(one, 0)) is not None]
