"""Heads: attention of which each rank computes some heads, for the tokens of all ranks.

Queries, keys and values are placed along their heads, with the batch outermost. So are the results
of the forward and of the backward. A mask is spread (``passes/move/spread.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes._torch import OpOverload
from passes.graph.fx_utils import RESHAPES, always_equal
from passes.move.layouts import dim_after
from passes.move.placed import Placed
from passes.move.spread import Frame, is_pointwise, named, spread
from passes.ops.markers import UNSHARD, unshard_of
from passes.recompute.recompute_activations import drops_nothing
from passes.split.split_rules import PRODUCTS, arguments_of, operands_of, permuted_dims

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
_CPU = "_scaled_dot_product_flash_attention_for_cpu"
#: On GPUs the first that takes the types, the sizes and the mask computes an attention.
_KINDS = (
    _CPU,
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
ATTENTIONS = tuple(
    getattr(_aten, kind + direction).default for kind in _KINDS for direction in ("", "_backward")
)
#: Names of arguments whose dimensions are batch, heads, and others.
_WITH_HEADS = {"grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp"}
MASKS = {"attn_mask", "attn_bias"}
_HEADS = 1


def attended(mover: Mover, node: fx.Node) -> Placed:
    """An attention; its result has several tensors, all with batch and heads outermost.

    Without dropout, states of random numbers are read by nothing.

    Raises:
        Refused: some operands have no heads of this rank. It names the weights that they need.
    """
    given = named_arguments(node)
    heads = [name for name in given if name in _WITH_HEADS]
    own, needs = {}, []
    for name in heads:
        one = given[name]
        placed = mover.placed.get(one)
        if placed is None:
            found = origin(one, _HEADS)
            needs += [] if found is None else [found]
        elif (placed.tokens, placed.features) == (0, _HEADS) and one.meta["val"].dim() >= 3:
            own[name] = placed
    if len(own) < len(heads):
        reason = f"{named(node)} reads tensors that are not sliced by heads"
        raise mover.refused(node, reason, needs)
    if not drops_nothing(node.target, node.args, node.kwargs):  # type: ignore[arg-type]
        raise mover.refused(node, f"{named(node)} reads random numbers (dropout)")
    names = frozenset(name for placed in own.values() for name in placed.names)
    moved = {name: placed.node for name, placed in own.items()}
    for name, one in given.items():
        if name in MASKS and isinstance(one, fx.Node):
            moved[name] = _mask(mover, one, node, given, names)
        elif name not in heads and isinstance(one, fx.Node) and one in mover.placed:
            moved[name] = mover.placed[one].node  # a result of the forward's attention
    count = len(node.args)
    args = tuple(moved.get(name, value) for name, value in list(given.items())[:count])
    kwargs = {name: moved.get(name, value) for name, value in list(given.items())[count:]}
    made = mover.emit(node.target, args, kwargs)
    return own["query"].of(made)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """An operator's arguments by name, in their order: positional ones, then others."""
    assert isinstance(node.target, OpOverload)
    names = (argument.name for argument in node.target._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _mask(
    mover: Mover, mask: fx.Node, node: fx.Node, given: dict[str, Any], names: frozenset[str]
) -> fx.Node:
    """A mask for the tokens and heads that this rank computes.

    Raises:
        Refused: it has values that other ranks cannot get, or the operator is a GPU's, whose
            masks have memory layouts of their own.
    """
    if node.target not in ATTENTIONS[:2]:
        raise mover.refused(node, f"{named(node)} reads a mask on a GPU")
    query, key = given["query"], given["key"]
    sizes = (*query.meta["val"].shape[:3], key.meta["val"].shape[2])
    made = spread(mover, mask, Frame(node, sizes, 0, _HEADS, names))
    if made is None:
        reason = f"{named(node)} reads a mask that is for this rank's tokens"
        raise mover.refused(node, reason)
    return made if made.meta["val"].dim() != 3 else mover.emit(_aten.unsqueeze.default, (made, 0))


def origin(node: fx.Node, dim: int) -> tuple[str, int] | None:
    """The weight and its dimension that a tensor's sliced dimension comes from; None: none.

    The search passes layouts, pointwise operators, and products with the weight as right operand.
    """
    for _ in range(64):
        if node.target is UNSHARD:
            return unshard_of(node).name, dim
        found = _before(node, dim) if node.op == "call_function" else None
        if found is None:
            return None
        node, dim = found
    return None


def _before(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """The input, and its dimension, that a dimension of a result comes from; None: none."""
    source: Any = node.args[0] if node.args else None
    rank = node.meta["val"].dim()
    if node.target in PRODUCTS or node.target is _aten.baddbmm.default:
        last = operands_of(node)[-1]
        if dim == 0 and rank == 3:
            return last, 0
        return (last, last.meta["val"].dim() - 1) if dim == rank - 1 else None
    if node.target is _aten.permute.default:
        return source, permuted_dims(node)[dim]
    if node.target in RESHAPES:
        found = dim_after(node.meta["val"].shape, source.meta["val"].shape, dim)
        return None if found is None else (source, found)
    if node.target in (_aten.cat.default, _aten.slice.Tensor):
        return (source if isinstance(source, fx.Node) else source[0]), dim
    if node.target is _aten.unsqueeze.default:
        new = arguments_of(node)[1] % rank
        return None if new == dim else (source, dim - (dim > new))
    is_broadcast = node.target is _aten.expand.default or is_pointwise(node)
    return _wide_input(node, dim) if is_broadcast else None


def _wide_input(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """The first input that has a dimension of a result whole, and its place there."""
    shape = node.meta["val"].shape
    for one in node.all_input_nodes:
        sizes = one.meta["val"].shape
        own = dim - len(shape) + len(sizes)
        if own >= 0 and always_equal(sizes[own], shape[dim]):
            return one, own
    return None
