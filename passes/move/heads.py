"""Heads: attention of which each rank computes some heads, for the tokens of all ranks.

Queries, keys and values are placed along their heads, with the batch outermost. So are the results
of the forward and of the backward. A mask is spread (``passes/move/spread.py``).

Attention by hand multiplies queries and keys, and scores and values, in ``bmm``. Sequences and
heads are one dimension there::

    q, k, v: [B, H, S, D] -> [B H, S, D]        this rank has H/N heads of N B sequences
    scores = bmm(q, k.t()) -> [B, H, S, S]      a bias, a mask, the exponentials and their sums
    y = bmm(scores, v)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes._torch import OpOverload
from passes.graph.fx_utils import RESHAPES, always_equal
from passes.graph.op_traits import COPIES
from passes.move.placed import Placed
from passes.move.spread import Frame, named, spread
from passes.recompute.recompute_activations import drops_nothing
from passes.split.origins import origin
from passes.split.split_rules import operands_of, permuted_dims

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


def product_of_heads(mover: Mover, node: fx.Node) -> Placed:
    """A ``bmm`` of tensors in which sequences and heads are one dimension.

    Raises:
        Refused: an operand has no heads of this rank. It names the weights that they need.
    """
    operands = operands_of(node)
    own = {one: mover.placed[one] for one in operands if one in mover.placed}
    heads = next(placed.heads for placed in own.values() if placed.heads)
    needs = [_origin_of_heads(one, heads) for one in operands if one not in own]
    outermost = all((one.tokens, one.heads) == (0, heads) for one in own.values())
    if needs or not outermost or node.kwargs:
        reason = f"{named(node)} reads tensors that are not sliced by heads"
        raise mover.refused(node, reason, [found for found in needs if found is not None])
    names = frozenset(name for placed in own.values() for name in placed.names)
    made = mover.emit(node.target, tuple(own[one].node for one in operands))
    return Placed(made, 0, 0, names, heads=heads)


def _origin_of_heads(node: fx.Node, heads: int) -> tuple[str, int] | None:
    """The weight and its dimension that the heads of ``[sequences heads, ...]`` come from.

    None: they come from none.
    """
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        sizes = source.meta["val"].shape
        if node.target in RESHAPES and len(sizes) == node.meta["val"].dim() + 1:
            return origin(source, _HEADS) if always_equal(sizes[_HEADS], heads) else None
        turns = node.target is _aten.permute.default and permuted_dims(node)[0] == 0
        if not turns and node.target not in COPIES:
            return None
        node = source
    return None
