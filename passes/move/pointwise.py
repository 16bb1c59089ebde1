"""Pointwise operators on placed tensors.

They keep the placement of tokens. A local tensor that is read beside a placed one is spread
(``passes/move/spread.py``). Totals and shares allow linear operators only
(``passes/move/placed.py``). A total that is added to a local gradient becomes a share, and so does
one that is put into rows of zeros, as of a bias by distance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.graph.fx_utils import RESHAPES
from passes.graph.op_traits import COPIES, tags_of
from passes.move.placed import Placed, Refused
from passes.move.spread import Frame, is_zeros, named, spread
from passes.move.tables import PUTS, put_total
from passes.split.origins import origin
from passes.split.split_rules import arguments_of, size_along

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
#: Linear operators of one tensor.
_LINEAR = {
    *RESHAPES,
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.sum.dim_IntList,
}


def pointwise(mover: Mover, node: fx.Node) -> Placed:
    """Placed operands of one placement, weights of the same slice, and spread local tensors."""
    rank = node.meta["val"].dim()
    own = {one: mover.placed[one] for one in node.all_input_nodes if one in mover.placed}
    if any(placed.is_total for placed in own.values()):
        return _pointwise_total(mover, node, own)

    def aligned(one: fx.Node, dim: int | None) -> int | None:
        return None if dim is None else dim - one.meta["val"].dim() + rank

    features = {aligned(one, placed.features) for one, placed in own.items()}
    tokens = {aligned(one, placed.tokens) for one, placed in own.items()} - {None}
    if len(features) != 1 or len(tokens) > 1:
        raise mover.refused(node, f"{named(node)} reads tensors of several placements")
    (feature,) = features
    token = next(iter(tokens), None)
    assert feature is not None
    for one, placed in own.items() if token is not None else ():
        assert token is not None
        allowed = (None, 1) if placed.tokens is None else node.meta["val"].shape[token : token + 1]
        if size_along(one, token, node) not in allowed:
            raise mover.refused(node, f"{named(node)} reads a tensor along tokens")
    heads = {placed.heads for placed in own.values()}
    if len(heads) != 1:
        raise mover.refused(node, f"{named(node)} reads tensors of several placements")
    names = frozenset(name for placed in own.values() for name in placed.names)
    sizes = tuple(node.meta["val"].shape)
    others = _spread_inputs(mover, node, Frame(node, sizes, token, feature, names))
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs),
        lambda one: own[one].node if one in own else others[one],
    )
    made = mover.emit(node.target, args, kwargs)
    return Placed(made, token, feature, names, heads=heads.pop())


def _spread_inputs(mover: Mover, node: fx.Node, frame: Frame) -> dict[fx.Node, fx.Node]:
    """The local tensors that a pointwise operator reads, in the placement of its result.

    Raises:
        Refused: this rank cannot compute one.
    """
    found = {}
    for one in node.all_input_nodes:
        if one in mover.placed:
            continue
        by_expert = (frame.tokens, frame.features) == (1, 0)
        comes_from = origin(one, 0) if by_expert and one.meta["val"].dim() == 3 else None
        made = spread(mover, one, frame) if comes_from is None else None
        if made is None:
            reason = f"{named(node)} reads {named(one)}, which is for this rank's tokens"
            if _is_random(one):
                reason = f"{named(node)} reads random numbers (dropout)"
            raise mover.refused(node, reason, _missing(mover, node))
        found[one] = made
    return found


def _missing(mover: Mover, node: fx.Node) -> list[tuple[str, int]]:
    """The weights that would have to stay too: of operands that are not placed, as of a gate."""
    first = next(one for one in node.all_input_nodes if one in mover.placed)
    features = mover.placed[first].features - first.meta["val"].dim()
    found = []
    for one in node.all_input_nodes:
        if one in mover.placed:
            continue
        rank = one.meta["val"].dim()
        own = origin(one, features + rank) if 0 <= features + rank < rank else None
        if own is not None:
            found.append(own)
    return found


def _is_random(node: fx.Node) -> bool:
    """Whether a tensor comes from random numbers, by pointwise operators and changes of layout."""
    for _ in range(8):
        is_seeded = torch.Tag.nondeterministic_seeded in tags_of(node.target)
        if is_seeded or "random" in str(node.target):
            return True
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return False


def _pointwise_total(mover: Mover, node: fx.Node, own: dict[fx.Node, Placed]) -> Placed:
    """A linear operator on totals; the gradient of a table's rows becomes one."""
    first = next(iter(own.values()))
    if node.target is _aten.where.self:
        return _masked_total(mover, node, first)
    nodes = {one: placed.node for one, placed in own.items()}
    for one in node.all_input_nodes:
        if one in own or node.target is not _aten.add.Tensor:
            continue
        if first.features != 0 or node.meta["val"].dim() != 2:
            return shared(mover, node)
        nodes[one] = put_total(mover, one, node, first.names)
    is_one = {(one.is_total, one.features) for one in own.values()} == {(True, first.features)}
    if not is_one or not _is_linear(node, len(nodes)):
        raise mover.refused(node, f"{named(node)} changes a sum over the tokens of all ranks")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
    names = frozenset(name for placed in own.values() for name in placed.names)
    made = mover.emit(node.target, args, kwargs)
    return Placed(made, None, first.features, names, is_total=True)


def _masked_total(mover: Mover, node: fx.Node, found: Placed) -> Placed:
    """A total with zeros in some places, which are the same on all ranks.

    ``found``: the total.
    """
    mask, *values = arguments_of(node)
    zeros = [one for one in values if one not in mover.placed and is_zeros(one)]
    frame = Frame(node, tuple(node.meta["val"].shape), None, found.features, found.names)
    nodes = {one: spread(mover, one, frame) for one in (mask, *zeros)}
    if mask not in mover.equal or len(zeros) != 1 or None in nodes.values():
        raise mover.refused(node, f"{named(node)} changes a sum over the tokens of all ranks")
    args = [nodes[one] if one in nodes else mover.placed[one].node for one in (mask, *values)]
    return found.of(mover.emit(node.target, tuple(args)))


def shared(mover: Mover, node: fx.Node) -> Placed:
    """A linear operator on shares and local gradients."""
    placed = _shares(mover, node)
    is_linear = node.target in _LINEAR or _is_linear(node, len(node.all_input_nodes))
    is_linear |= node.target in PUTS and all(
        one in placed or one in mover.equal for one in node.all_input_nodes
    )
    if not is_linear:
        raise _refused_share(mover, node)
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda one: placed[one].node if one in placed else one
    )
    names = frozenset(name for found in placed.values() for name in found.names)
    return Placed(mover.emit(node.target, args, kwargs), None, -1, names, is_share=True)


def shared_gradient(mover: Mover, node: fx.Node) -> fx.Node:
    """The marker of a gradient that is a share, of a weight that the ranks reduce: it stays."""
    for one, found in _shares(mover, node).items():
        node.replace_input_with(one, found.node)
    return node


def _shares(mover: Mover, node: fx.Node) -> dict[fx.Node, Placed]:
    """The placed inputs of an operator, totals as shares.

    Raises:
        Refused: one is neither.
    """
    found = {one: _share_of(mover, one) for one in node.all_input_nodes if one in mover.placed}
    if not all(one.is_share for one in found.values()):
        raise _refused_share(mover, node)
    return found


def _refused_share(mover: Mover, node: fx.Node) -> Refused:
    reason = f"{named(node)} changes a sum over the tokens and features of all ranks"
    return mover.refused(node, reason)


def _share_of(mover: Mover, node: fx.Node) -> Placed:
    """A total as a share; other placements as they are."""
    found = mover.placed[node]
    if not found.is_total:
        return found
    sizes = node.meta["val"].shape
    start, stop = mover.layout.rows(sizes[found.features])
    behind = [0, 0] * (len(sizes) - 1 - found.features)
    pads = [*behind, start, sizes[found.features] - stop]
    made = mover.emit(_aten.constant_pad_nd.default, (found.node, pads, 0))
    return Placed(made, None, -1, found.names, is_share=True)


def _is_linear(node: fx.Node, operands: int) -> bool:
    """Whether a pointwise operator is linear in its tensors, which are all ``operands``."""
    if len(node.all_input_nodes) != operands:
        return False
    if node.target in COPIES or node.target is _aten.neg.default:
        return True
    tensors = [one for one in node.args if isinstance(one, fx.Node)]
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor):
        return len(tensors) == 2
    if node.target is _aten.mul.Tensor:
        return len(tensors) == 1
    return node.target is _aten.div.Tensor and tensors == list(node.args[:1])
