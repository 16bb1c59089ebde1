"""Chunked: a tensor in chunks of this rank's tokens, or of its sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A tensor in chunks of its tokens.

    ``nodes``: the chunks, each ``[tokens, ...]``. ``lead``: the number of the whole tensor's first
    dimensions that are tokens. ``names``: the weights that it comes from. ``is_end``: it is the
    result of the last product. ``others``: a bias, and whole tensors, that are added
    to the whole tensor. So nothing waits for the sum of one chunk. ``sequences``: the number of
    sequences of each chunk; the chunks have the whole tensor's dimensions, sequences outermost
    (``chunk_sequences.py``). Empty: the chunks are of tokens.
    """

    nodes: tuple[fx.Node, ...]
    lead: int
    names: frozenset[str]
    is_end: bool = False
    others: tuple[fx.Node, ...] = ()
    sequences: tuple[int, ...] = ()


def sizes_of(tokens: int, count: int) -> list[int]:
    """The tokens, or the sequences, of each chunk.

    >>> sizes_of(10, 4), sizes_of(3, 4)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    least, more = divmod(tokens, min(count, tokens))
    return [least + (index < more) for index in range(min(count, tokens))]


def is_static(node: fx.Node) -> bool:
    """Whether all sizes of a tensor, or of all tensors of a node, are numbers."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    shapes = [one.shape for one in values if isinstance(one, torch.Tensor)]
    return bool(shapes) and all(isinstance(size, int) for shape in shapes for size in shape)


def joined(
    made: Callable[[Any, tuple[Any, ...]], fx.Node], whole: fx.Node, chunks: Sequence[fx.Node]
) -> fx.Node:
    """The whole tensor of chunks of sequences, in the memory layout that it has in one piece.

    A result without sequences, as a state of random numbers that nothing reads, is the first one.

    ``made``: makes a node of an operator and its arguments.
    """
    value, rows = whole.meta["val"], 0
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        rows = value.shape[0]
    if sum(one.meta["val"].shape[0] for one in chunks if rows) != rows or not rows:
        return chunks[0]
    strides = value.stride()
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    if order == sorted(order) or order[0] != 0:
        return made(_aten.cat.default, (list(chunks),))
    turned = [made(_aten.permute.default, (one, order)) for one in chunks]
    found = made(_aten.cat.default, (turned,))
    return made(_aten.permute.default, (found, [order.index(dim) for dim in sorted(order)]))
