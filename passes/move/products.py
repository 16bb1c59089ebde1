"""Products: ``mm`` and ``addmm`` of tokens and weights, of which each rank has a slice.

=====================================  ========================================================
local tokens, columns of a weight      the tokens are gathered; each rank has some features
features of tokens, rows of a weight   a partial sum
local tokens, features of tokens       the tokens are gathered; a total (a weight's gradient)
=====================================  ========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.move.heads import origin
from passes.move.placed import PartialSum, Placed
from passes.move.spread import named
from passes.move.token_collectives import all_tokens
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
    elif right and left is None and right.is_weight and right.features == 1:
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


def _all_tokens_turned(mover: Mover, turned: fx.Node, node: fx.Node, placed: Placed) -> fx.Node:
    """The tokens of all ranks along the second dimension of a matrix."""
    if turned.target is _aten.permute.default and permuted_dims(turned) == [1, 0]:
        (source, *_) = turned.all_input_nodes
    else:  # the forward saves the transposed matrix
        source = mover.emit(_aten.permute.default, (turned, [1, 0]))
    everything = all_tokens(mover, source, node, placed.names)
    return mover.emit(_aten.permute.default, (everything, [1, 0]))


def _missing(mover: Mover, node: fx.Node) -> list[tuple[str, int]]:
    """The weights that would have to stay too: of matrices that are not placed."""
    local = [one for one in operands_of(node)[-2:] if one not in mover.placed]
    return [found for one in local if (found := origin(one, 0)) is not None]
