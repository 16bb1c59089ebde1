"""Experts: ``bmm`` and ``baddbmm`` of stacked weights ``[experts, in, out]``.

Their tokens are ``[experts, tokens, features]``. The ranks share a stack in one of two ways:

===============  ==================================================================================
by expert        Dimension 0. The tokens of an expert go to the rank that has it, in an all-to-all,
                 and come back in another one.
by hidden size   The columns of the first weight and the rows of the second one. The tokens of all
                 ranks are gathered. The products are partial sums.
===============  ==================================================================================

By expert with N ranks, E experts, and T tokens of d features for each, on each rank::

    x [E, T, d] -> all-to-all -> [E/N, N T, d]; bmm with the own [E/N, d, F]; ...
    y [E/N, N T, d] -> all-to-all -> [E, T, d]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.move.heads import product_of_heads
from passes.move.placed import PartialSum, Placed
from passes.move.spread import named
from passes.move.token_collectives import STACKS, all_stacked
from passes.split.origins import origin
from passes.split.split_rules import LAID_OUT, operands_of, permuted_dims

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
STACKED = {_aten.bmm.default, _aten.baddbmm.default}
_EXPERTS, _TOKENS, _FEATURES = 0, 1, 2


def stacked(mover: Mover, node: fx.Node) -> Placed | PartialSum:
    """A product of stacks: see the cases below. Attention by hand is in ``heads.py``."""
    *_, one, other = operands_of(node)
    left, right = mover.placed.get(one), mover.placed.get(other)
    if any(placed is not None and placed.heads for placed in (left, right)):
        return product_of_heads(mover, node)
    found = None
    if not node.kwargs and right is not None and right.is_weight:
        found = _columns(mover, node, right) if left is None else _rows(mover, node, left, right)
    elif not node.kwargs and node.target is _aten.bmm.default:
        found = _gradient(mover, node, left, right)
    if found is None:
        raise mover.refused(node, f"{named(node)} has no rule", _missing(mover, node))
    return found


def _columns(mover: Mover, node: fx.Node, weight: Placed) -> Placed | None:
    """Local tokens times the experts, or the columns, that this rank has; None: other parts."""
    *bias, tokens, stack = operands_of(node)
    if weight.features not in (_EXPERTS, _FEATURES):
        return None
    experts = stack.meta["val"].shape[_EXPERTS]
    if weight.features == _EXPERTS and not mover.divides(experts):
        raise mover.refused(node, f"{mover.ranks} ranks do not divide the {experts} experts")
    own, names = [], weight.names
    for one in bias:
        placed = mover.placed.get(one)
        if placed is None or not placed.is_weight or placed.features != weight.features:
            found = origin(one, weight.features)
            reason = "its bias does not stay with its weight"
            raise mover.refused(node, reason, [found] if found else ())
        own.append(placed.node)
        names |= placed.names
    everything = all_stacked(mover, tokens, node, names, weight.features == _EXPERTS)
    made = mover.emit(node.target, (*own, everything, weight.node))
    return Placed(made, _TOKENS, weight.features, names)


def _rows(mover: Mover, node: fx.Node, left: Placed, weight: Placed) -> PartialSum | None:
    """The second product: a result of own experts, or a partial sum; None: of other parts."""
    *bias, _, _ = operands_of(node)
    back = STACKS.get((3, left.tokens, left.features))
    if back is None or weight.features != _contracted(left):
        return None
    if any(one in mover.placed for one in bias):
        raise mover.refused(node, "the bias of the second product is sliced")
    part = mover.emit(_aten.bmm.default, (left.node, weight.node))
    return PartialSum(part, (), tuple(bias), left.names | weight.names, back)


def _gradient(
    mover: Mover, node: fx.Node, left: Placed | None, right: Placed | None
) -> Placed | None:
    """The gradient of a stack, a total: tokens are contracted; None: another product."""
    one, other = operands_of(node)
    turned = left is None or left.tokens == _FEATURES  # its tokens are columns
    upright = right is None or right.tokens == _TOKENS
    placed = left or right
    if placed is None or not turned or not upright:
        return None
    if left and right and (left.features, right.features) != (_EXPERTS, _EXPERTS):
        return None
    features = left.features if left else placed.features
    by_expert = features == _EXPERTS
    if not by_expert and features != (1 if left else _FEATURES):
        return None
    names = placed.names
    if left is None:
        is_turned = one.target is _aten.permute.default and permuted_dims(one) == [0, 2, 1]
        source = one.all_input_nodes[0] if is_turned else mover.emit(*_turn(one))
        everything = all_stacked(mover, source, node, names, by_expert)
        own = mover.emit(*_turn(everything))
    else:
        own = left.node
    tokens = right.node if right else all_stacked(mover, other, node, names, by_expert)
    made = mover.emit(node.target, (own, tokens))
    return Placed(made, None, features, names, is_total=True)


def _turn(node: fx.Node) -> tuple[object, tuple[object, ...]]:
    return _aten.permute.default, (node, [0, 2, 1])


def _contracted(left: Placed) -> int:
    """The dimension of the second weight that the ranks share, for these features."""
    return 0 if left.features == _EXPERTS else 1


def _missing(mover: Mover, node: fx.Node) -> list[tuple[str, int]]:
    """The second weight, which would have to stay too."""
    *_, one, other = operands_of(node)
    left = mover.placed.get(one)
    if left is None or left.tokens != _TOKENS or other in mover.placed:
        return []
    found = origin(other, _contracted(left))
    return [] if found is None else [found]


def ways_to_share(marker: fx.Node) -> tuple[list[int], str]:
    """The dimensions along which the ranks may share a stack, as a first weight.

    Also the reason if there are none. ``marker``: the ``unshard`` of the stack.
    """
    read, reason = [marker], "nothing reads it"
    for node in read:
        for user in node.users:
            if user.target in STACKED and operands_of(user)[-1] is node:
                found = (origin(node, _EXPERTS), origin(node, _FEATURES))
                return list(dict.fromkeys(one[1] for one in found if one is not None)), ""
            if user.target in LAID_OUT:
                read.append(user)
            else:
                reason = f"{named(user)} has no rule: experts stay in bmm and baddbmm"
    return [], reason
