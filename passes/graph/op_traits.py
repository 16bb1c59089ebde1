"""Operator traits: fusible by Inductor or not, reductions, and effective users.

Inductor fuses connected pointwise operators and reductions; intermediate results inside a fused
kernel never touch memory. A matrix product, a convolution, attention or a collective is a
*barrier*: a kernel of its own, whose inputs must be in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.graph.fx_utils import CAST, COLLECTIVES, by_target, concrete, is_alias, is_getitem
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.ops.model_collectives import kind_of
from passes.ops.packing import PACKING

_aten = torch.ops.aten
#: Reductions without ``torch.Tag.reduction``.
REDUCTIONS = {
    _aten.sum.dim_IntList,
    _aten.sum.default,
    _aten.mean.dim,
    _aten.mean.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.var_mean.correction,
    _aten.var.correction,
    _aten.prod.default,
    _aten.any.default,
    _aten.any.dim,
    _aten.all.default,
    _aten.argmax.default,
}
#: Copies, also into another type.
COPIES = {CAST, _aten.clone.default, _aten._to_copy.default}
# Operators with a pointwise or reduction tag are fusible; these lack it, but Inductor fuses them.
_ALSO_FUSIBLE = REDUCTIONS | {
    _aten.cat.default,
    _aten.full.default,
    _aten.full_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.empty_like.default,
    _aten.scalar_tensor.default,
    _aten.argmin.default,
    _aten.embedding.default,
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.constant_pad_nd.default,
    _aten.clone.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
    _aten.copy.default,
    _aten.arange.start_step,
    torch.ops.prims.iota.default,
    torch.ops.prims.convert_element_type.default,
    _aten.native_dropout.default,
}


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor may run this node inside a fused kernel."""
    if node.op != "call_function":
        return False
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_fusible(source)
    return fuses(node.target)


@by_target
def fuses(target: Any) -> bool:
    """Whether Inductor may fuse an operator; for ``getitem`` see :func:`is_fusible`."""
    if target in COLLECTIVES or target in (UNSHARD, REDUCE_GRAD) or target in PACKING:
        return False
    if kind_of(target) is not None:
        return False
    if target in _ALSO_FUSIBLE or str(target).startswith("prims.inductor_"):
        return True
    tags = tags_of(target)
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def is_reduction(node: fx.Node) -> bool:
    """Whether a node is a reduction."""
    return node.op == "call_function" and _reduces(node.target)


@by_target
def _reduces(target: Any) -> bool:
    return target in REDUCTIONS or torch.Tag.reduction in tags_of(target)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of a result comes from the elements at its place."""
    tags = tags_of(node.target)
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return node.target in COPIES or torch.Tag.pointwise in tags


def tags_of(target: Any) -> tuple[torch.Tag, ...]:
    """The tags of an operator; none for another target."""
    return tuple(getattr(target, "tags", ()))


def is_concatenation(node: fx.Node) -> bool:
    """Whether a node concatenates two or more tensors.

    Inductor skips empty tensors of one dimension, as torch does, and copies a single tensor.
    """
    if node.op != "call_function" or node.target is not _aten.cat.default:
        return False
    return len(concatenated(node)) > 1


def concatenated(node: fx.Node) -> list[fx.Node]:
    """The tensors that a concatenation joins."""
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    return [
        part
        for part in parts
        if isinstance(part, fx.Node) and concrete(part.meta["val"].shape) != [0]
    ]


def effective_users(node: fx.Node) -> list[fx.Node]:
    """The readers of a node's memory: its users, and those of its views and waits."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_alias(user):
                stack.append(user)
            else:
                found[user] = None
    return list(found)
