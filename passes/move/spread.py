"""Spread: a local tensor in the placement of an operator that reads it beside a placed tensor.

=====================================================  ==========================================
a constant: of ``full`` or ``iota``, equal on ranks    as it is; its slice along ``features``
one value for each token, broadcast along features     the values of all ranks' tokens, gathered
pointwise operators and broadcasts of such tensors     computed again from their spread inputs
=====================================================  ==========================================

Everything else has values that a rank cannot know: a random mask with features, the mean of this
rank's tokens. The result may be smaller than the operator's other operand: it broadcasts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.graph.fx_utils import CAST, always_equal

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
_IOTA = torch.ops.prims.iota.default
_FULL = {_aten.full.default, _aten.scalar_tensor.default}
COPIES = {CAST, _aten.clone.default, _aten._to_copy.default}


@dataclasses.dataclass(frozen=True)
class Frame:
    """An operator's result: its dimensions of tokens and features.

    ``node``: the operator. ``names``: the weights that it comes from.
    """

    node: fx.Node
    tokens: int | None
    features: int
    names: frozenset[str]


def spread(mover: Mover, node: fx.Node, frame: Frame) -> fx.Node | None:
    """A local tensor as its part of a frame; None: this rank cannot compute it."""
    key = node, frame.tokens, frame.features, frame.node.meta["val"].dim()
    if key not in mover.spreads:
        mover.spreads[key] = _spread(mover, node, frame)
    return mover.spreads[key]


def _spread(mover: Mover, node: fx.Node, frame: Frame) -> fx.Node | None:
    value = node.meta.get("val")
    if node in mover.placed or not isinstance(value, torch.Tensor):
        return None
    sizes, whole = value.shape, frame.node.meta["val"].shape
    behind = len(whole) - len(sizes)
    feature = frame.features - behind
    token = -1 if frame.tokens is None else frame.tokens - behind
    has_features = feature >= 0 and not always_equal(sizes[feature], 1)
    has_tokens = token >= 0 and not always_equal(sizes[token], 1)
    if is_filled(node):
        return _filled(mover, node)
    if node in mover.constants and not has_tokens:
        return _slice(mover, node, feature) if has_features else node
    if not has_features:
        is_outer = token == 0 and always_equal(sizes[0], whole[behind])
        return mover.all_tokens(node, frame.node, frame.names) if is_outer else None
    if node.target is _aten.expand.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return spread(mover, source, frame)
    if not is_pointwise(node):
        return None
    inputs = {one: spread(mover, one, frame) for one in node.all_input_nodes}
    if None in inputs.values():
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
    return mover.emit(node.target, args, kwargs)


def constants_of(graph: fx.Graph) -> set[fx.Node]:
    """The tensors that are equal on all ranks: they come from ``full`` and ``iota`` alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in _tags(node):
            continue
        inputs = node.all_input_nodes
        is_first = not inputs and (node.target in _FULL or node.target is _IOTA)
        if is_first or (inputs and all(one in found for one in inputs)):
            found.add(node)
    return found


def is_filled(node: fx.Node) -> bool:
    """Whether a tensor has one value everywhere, which is a number of the graph."""
    if node.target not in _FULL:
        return False
    return not isinstance(node.args[node.target is _aten.full.default], fx.Node)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of a result comes from the elements at its place."""
    if torch.Tag.nondeterministic_seeded in _tags(node):
        return False
    return node.target in COPIES or torch.Tag.pointwise in _tags(node)


def _tags(node: fx.Node) -> tuple[torch.Tag, ...]:
    tags: tuple[torch.Tag, ...] = tuple(getattr(node.target, "tags", ()))
    return tags


def _filled(mover: Mover, node: fx.Node) -> fx.Node:
    """One value everywhere: of size one."""
    if node.target is not _aten.full.default:
        return node
    sizes = [1] * node.meta["val"].dim()
    return mover.emit(node.target, (sizes, *node.args[1:]), node.kwargs)


def _slice(mover: Mover, node: fx.Node, dim: int) -> fx.Node:
    """This rank's slice of a constant."""
    size = node.meta["val"].shape[dim] // mover.ranks
    start = mover.ctx.rank * size
    return mover.emit(_aten.slice.Tensor, (node, dim, start, start + size))
