"""Spread: a local tensor in the placement of an operator that reads it beside a placed tensor.

======================================  ========================================================
constants: of ``full`` or ``iota``      as they are; their slice along ``features``
weights without ``features``            as they are: they are gathered, and equal on all ranks
lookups in weights, by constants        their slice along ``features``, as of a bias by distance
one value for each token                the values of all ranks' tokens, gathered
one value for all tokens of a rank      the values of all ranks, gathered
pointwise operators and broadcasts      computed again from their spread inputs, where a tensor has
                                        values along ``features`` or its inputs are fewer bytes
======================================  ========================================================

The tokens of experts (``experts.py``) are gathered in the same way, or go to the experts' ranks.

Everything else has values that a rank cannot know, as a random mask with features. The result may
be smaller than the operator's other operand: it broadcasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes._torch import OpOverload
from passes.graph.fx_utils import always_equal, bytes_of
from passes.graph.op_traits import is_pointwise, tags_of
from passes.move.token_collectives import all_stacked, all_tokens
from passes.split.origins import origin

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
_IOTA = torch.ops.prims.iota.default
_FULL = {_aten.full.default, _aten.scalar_tensor.default}


@dataclasses.dataclass(frozen=True)
class Frame:
    """An operator's result: its local sizes, and its dimensions of tokens and features.

    ``node``: the operator. ``names``: the weights that it comes from.
    """

    node: fx.Node
    sizes: tuple[int | torch.SymInt, ...]
    tokens: int | None
    features: int
    names: frozenset[str]


def spread(mover: Mover, node: fx.Node, frame: Frame) -> fx.Node | None:
    """A local tensor as its part of a frame; None: this rank cannot compute it."""
    rows = frame.sizes[0] if frame.sizes and isinstance(frame.sizes[0], int) else None
    key = node, frame.tokens, frame.features, len(frame.sizes), rows
    if key not in mover.spreads:
        mover.spreads[key] = _spread(mover, node, frame)
    return mover.spreads[key]


def _spread(mover: Mover, node: fx.Node, frame: Frame) -> fx.Node | None:
    value = node.meta.get("val")
    if node in mover.placed or not isinstance(value, torch.Tensor):
        return None
    sizes, whole = value.shape, frame.sizes
    behind = len(whole) - len(sizes)
    feature = frame.features - behind
    token = -1 if frame.tokens is None else frame.tokens - behind
    has_features = feature >= 0 and not always_equal(sizes[feature], 1)
    has_tokens = token >= 0 and not always_equal(sizes[token], 1)
    if is_filled(node):
        return _filled(mover, node)
    is_equal = node in mover.equal and not has_tokens
    if is_equal and (not has_features or _may_be_sliced(mover, node, feature)):
        return _slice(mover, node, feature) if has_features else node
    if frame.tokens == frame.features:
        return None
    if token == 1 and len(sizes) == len(whole) == 3 and has_tokens:
        by_expert = feature == 0
        if by_expert or not has_features:
            return all_stacked(mover, node, frame.node, frame.names, by_expert)
    if has_features or (has_tokens and _is_larger_than_inputs(mover, node)):
        found = _again(mover, node, frame)
        if found is not None or has_features:
            return found
    if token == 0 and always_equal(sizes[0], whole[behind]):
        return all_tokens(mover, node, frame.node, frame.names)
    return None if has_tokens else _of_each_rank(mover, node, frame)


def _may_be_sliced(mover: Mover, node: fx.Node, feature: int) -> bool:
    """Whether a rank takes its slice of a tensor that is equal on all ranks.

    Where the dimension is that of a weight, this weight would have to stay.
    """
    return node in mover.constants or origin(node, feature) is None


def _is_larger_than_inputs(mover: Mover, node: fx.Node) -> bool:
    """Whether it is fewer bytes to gather an operator's inputs, as of a mask from its rows."""
    inputs = [one for one in node.all_input_nodes if one not in mover.constants]
    return sum(bytes_of(one.meta.get("val")) for one in inputs) < bytes_of(node.meta["val"])


def _again(mover: Mover, node: fx.Node, frame: Frame) -> fx.Node | None:
    """A pointwise operator or a broadcast, from its spread inputs; None: it is none of these."""
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


def _of_each_rank(mover: Mover, node: fx.Node, frame: Frame) -> fx.Node | None:
    """The same values for all tokens of a rank, as of positions; None: its sizes are symbolic.

    They are gathered once for each rank, and repeated for its tokens.
    """
    tokens = frame.sizes[0]
    sizes = node.meta["val"].shape
    whole = [*[1] * (len(frame.sizes) - len(sizes)), *sizes]
    if frame.tokens != 0 or not all(isinstance(size, int) for size in (tokens, *whole)):
        return None
    emit = mover.emit
    own = node if list(sizes) == whole else emit(_aten.reshape.default, (node, whole))
    ranks = emit(_aten.unsqueeze.default, (all_tokens(mover, own, frame.node, frame.names), 1))
    repeated = emit(_aten.expand.default, (ranks, [-1, tokens, *[-1] * (len(whole) - 1)]))
    return emit(_aten.reshape.default, (repeated, [-1, *whole[1:]]))


def constants_of(
    graph: fx.Graph, also: Collection[Any] = (), inputs: Iterable[fx.Node] = ()
) -> set[fx.Node]:
    """The tensors that come from ``full`` and ``iota`` alone, which are equal on all ranks.

    ``also``: other operators whose results are; ``inputs``: inputs that are.
    """
    found = set(inputs)
    for node in graph.nodes:
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags_of(node.target):
            continue
        sources = node.all_input_nodes
        is_first = not sources and (node.target in _FULL or node.target is _IOTA)
        is_first = is_first or node.target in also
        if is_first or (sources and all(one in found for one in sources)):
            found.add(node)
    return found


def is_filled(node: fx.Node) -> bool:
    """Whether a tensor has one value everywhere, which is a number of the graph."""
    if node.target not in _FULL:
        return False
    return not isinstance(node.args[node.target is _aten.full.default], fx.Node)


def is_zeros(node: fx.Node) -> bool:
    """Whether a tensor has zero everywhere, which is a number of the graph."""
    return is_filled(node) and bool(node.args[node.target is _aten.full.default] == 0)


def _filled(mover: Mover, node: fx.Node) -> fx.Node:
    """One value everywhere: of size one."""
    if node.target is not _aten.full.default:
        return node
    sizes = [1] * node.meta["val"].dim()
    return mover.emit(node.target, (sizes, *node.args[1:]), node.kwargs)


def _slice(mover: Mover, node: fx.Node, dim: int) -> fx.Node:
    """This rank's slice of a tensor that is equal on all ranks."""
    start, stop = mover.layout.rows(node.meta["val"].shape[dim])
    return mover.emit(_aten.slice.Tensor, (node, dim, start, stop))


def named(node: fx.Node) -> str:
    """An operator's name in reasons."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    return str(getattr(target, "__name__", target))
