"""Origins: the weight that a dimension of a tensor comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.graph.fx_utils import RESHAPES, always_equal, tensor_inputs
from passes.graph.op_traits import is_pointwise
from passes.ops.markers import UNSHARD, unshard_of
from passes.split.split_rules import PRODUCTS, arguments_of, operands_of, permuted_dims

_aten = torch.ops.aten


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
    for one in tensor_inputs(node):
        sizes = one.meta["val"].shape
        own = dim - len(shape) + len(sizes)
        if own >= 0 and always_equal(sizes[own], shape[dim]):
            return one, own
    return None


def dim_after(
    old: Sequence[int | torch.SymInt], new: Sequence[int | torch.SymInt], dim: int
) -> int | None:
    """The dimension of a reshape's result that a dimension becomes; None: there is none.

    It keeps the dimension; or it is the outermost one into which the dimension is split; or it is
    the dimension merged with later ones.

    >>> dim_after([3, 5, 16], [3, 5, 4, 4], 2), dim_after([3, 5, 4, 4], [3, 5, 16], 2)
    (2, 2)
    >>> dim_after([3, 5, 16], [15, 16], 2), dim_after([3, 5, 16], [3, 80], 2)
    (1, None)
    """
    before, size = math.prod(old[:dim]), old[dim]
    for place, other in enumerate(new):
        if not always_equal(math.prod(new[:place]), before) or always_equal(other, 1):
            continue
        if always_equal(size, other):
            return place
        if isinstance(size, int) and isinstance(other, int):
            return place if size % other == 0 or other % size == 0 else None
    return None
