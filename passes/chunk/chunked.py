"""Chunked: a tensor in chunks of this rank's tokens, or of its sequences."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx


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
    tensors = value if isinstance(value, list | tuple) else [value]
    tensors = [one for one in tensors if isinstance(one, torch.Tensor)]
    return bool(tensors) and all(isinstance(size, int) for one in tensors for size in one.shape)
