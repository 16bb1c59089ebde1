"""Layouts: operators that give the elements of placed tensors other places.

A reshape may split the sliced dimension, or merge it with later ones, as attention does with its
heads: if the sliced dimension stays outermost among these, each rank keeps one block. The ranks
must divide it, before and after::

    [B, S, H D] -> [B, S, H, D]          rank r has the heads r H/N ...
    [B, K, G, S, D] -> [B, K G, S, D]    K heads for keys, each for G queries
    [B, H, S, D] -> [B H, S, D]          and back: the heads of each sequence together

Slices keep the places of a placed tensor's tokens and features.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.graph.fx_utils import always_equal
from passes.graph.metadata import CHUNK
from passes.move.placed import Placed, Refused
from passes.move.spread import is_filled, named
from passes.move.token_collectives import joined_tokens, sliced_tokens
from passes.split.origins import dim_after
from passes.split.split_rules import arguments_of, permuted_dims

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten
#: The fewest dimensions of tensors in which sequences and heads are one.
_OF_HEADS = 3


def viewed(mover: Mover, node: fx.Node) -> Placed:
    """A reshape, with tokens outermost before and after."""
    source, sizes = arguments_of(node)
    found = mover.placed[source]
    if (merged := _merged(mover, node, found)) is not None:
        return merged
    shape = list(node.meta["val"].shape)
    features = dim_after(source.meta["val"].shape, shape, found.features)
    is_outer = found.tokens is None or (found.tokens == 0 and found.features > 0)
    if features is None or not is_outer or (found.tokens == 0 and features == 0):
        raise mover.refused(node, f"{named(node)} mixes tokens and features")
    size, before = shape[features], source.meta["val"].shape[found.features]
    if not always_equal(size, before) and not (mover.divides(size) and mover.divides(before)):
        reason = f"{mover.ranks} ranks do not divide the {size} heads, or parts, of {named(node)}"
        raise mover.refused(node, reason)
    sizes = [size if isinstance(size, int) else sizes[dim] for dim, size in enumerate(shape)]
    sizes[features] = mover.layout.own_rows(shape[features])
    if found.tokens == 0:
        sizes = mover.of_all(sizes, shape)
    made = mover.emit(_aten.reshape.default, (found.node, sizes))
    return dataclasses.replace(found, node=made, features=features)


def _merged(mover: Mover, node: fx.Node, found: Placed) -> Placed | None:
    """Sequences and heads as one dimension, or apart again; None: another reshape."""
    old, new = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    wide, flat = (new, old) if found.heads else (old, new)
    if len(wide) != len(flat) + 1 or len(flat) < _OF_HEADS:
        return None
    heads = found.heads or (wide[1] if (found.tokens, found.features) == (0, 1) else 0)
    if not heads or not mover.divides(heads):
        return None
    inner, wanted = list(flat[1:]), [wide[0] * heads, heads, *flat[1:]]
    if not all(map(always_equal, [flat[0], *wide[1:]], wanted)):
        return None
    if not all(isinstance(size, int) for size in inner):
        return None
    own = [mover.layout.own_rows(heads)] if found.heads else []
    made = mover.emit(_aten.reshape.default, (found.node, [-1, *own, *inner]))
    return Placed(made, 0, len(own), found.names, heads=0 if found.heads else int(heads))


def permuted(mover: Mover, node: fx.Node) -> Placed:
    """A permutation."""
    (source,) = node.all_input_nodes
    found, dims = mover.placed[source], permuted_dims(node)
    tokens = None if found.tokens is None else dims.index(found.tokens)
    made = mover.emit(node.target, (found.node, node.args[1]))
    return dataclasses.replace(found, node=made, tokens=tokens, features=dims.index(found.features))


def unsqueezed(mover: Mover, node: fx.Node) -> Placed:
    """A new dimension of size one."""
    source, dim = arguments_of(node)
    dim %= node.meta["val"].dim()
    return _moved(mover, node, mover.placed[source], lambda one: one + (one >= dim))


def squeezed(mover: Mover, node: fx.Node) -> Placed | None:
    """A dimension of size one less; None: it is one of tokens, or not of size one."""
    source, dim = arguments_of(node)
    found, dim = mover.placed[source], dim % source.meta["val"].dim()
    if dim in (found.tokens, found.features) or not always_equal(source.meta["val"].shape[dim], 1):
        return None
    return _moved(mover, node, found, lambda one: one - (one > dim))


def _moved(mover: Mover, node: fx.Node, found: Placed, place: Any) -> Placed:
    made = mover.emit(node.target, (found.node, *node.args[1:]))
    tokens = None if found.tokens is None else place(found.tokens)
    return dataclasses.replace(found, node=made, tokens=tokens, features=place(found.features))


def expanded(mover: Mover, node: fx.Node) -> Placed | None:
    """Repeated along other dimensions than tokens and features; None: along these."""
    source, *_ = arguments_of(node)
    found, shape = mover.placed[source], node.meta["val"].shape
    behind = len(shape) - source.meta["val"].dim()
    tokens = None if found.tokens is None else found.tokens + behind
    features = found.features + behind
    sizes: list[Any] = [*shape]
    for dim in (tokens, features):
        if dim is None:
            continue
        if not always_equal(shape[dim], source.meta["val"].shape[dim - behind]):
            return None
        sizes[dim] = -1
    if not all(isinstance(size, int) for size in sizes):
        return None
    made = mover.emit(node.target, (found.node, sizes))
    return dataclasses.replace(found, node=made, tokens=tokens, features=features)


def joined(mover: Mover, node: fx.Node) -> Placed | None:
    """A concatenation of tensors of one placement; None: along features, or of others.

    Along tokens, those of each rank are joined, if they are outermost.
    """
    sources, *rest = arguments_of(node)
    own = [mover.placed.get(one) for one in sources]
    first = own[0]
    dim = (rest[0] if rest else 0) % node.meta["val"].dim()
    if first is None or dim == first.features:
        return None
    for one in own:
        if one is None or one.of(first.node) != dataclasses.replace(first, names=one.names):
            return None
    parts = [one.node for one in own if one is not None]
    if dim != first.tokens:
        made = mover.emit(node.target, (parts, dim))
    elif dim == 0 and all(map(_is_static, parts)):
        made = joined_tokens(mover, parts)
    else:
        return None
    names = frozenset(name for one in own if one is not None for name in one.names)
    return dataclasses.replace(first, node=made, names=names)


def _is_static(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def split(mover: Mover, node: fx.Node) -> Placed | None:
    """Parts along another dimension than tokens and features; None: along these.

    :func:`element_of` gives each.
    """
    source, size, *rest = arguments_of(node)
    found, dim = mover.placed[source], (rest[0] if rest else 0) % source.meta["val"].dim()
    if dim == found.features and not found.is_weight:
        raise fused(mover, node)
    if dim in (found.tokens, found.features):
        return None
    return found.of(mover.emit(node.target, (found.node, size, dim)))


def fused(mover: Mover, node: fx.Node) -> Refused:
    """The error for parts of the sliced features, as of fused queries, keys and values.

    A rank would hold some columns of each part. Checkpoints of torch describe no such shard:
    they refuse ``_StridedShard`` on a mesh of one dimension (2.13, 2.15).
    """
    return mover.refused(
        node,
        f"{named(node)} takes parts of one product, as queries, keys and values of a fused weight: "
        "no checkpoint describes a shard of each part",
    )


def element_of(mover: Mover, node: fx.Node) -> Placed:
    """A tensor of several that have one placement."""
    source, index = arguments_of(node)
    found = mover.placed[source]
    return found.of(mover.emit(node.target, (found.node, index)))


def sliced(mover: Mover, node: fx.Node) -> Placed:
    """A slice along a dimension without tokens and features, or zeros around such a slice.

    A chunk of tokens is one of each rank's tokens.
    """
    *sources, dim = arguments_of(node)[: 2 if node.target is _aten.slice.Tensor else 3]
    source = sources[-1]
    found, rank = mover.placed.get(source), node.meta["val"].dim()
    if found is not None and CHUNK.is_set(node) and found.tokens == 0 and found.features:
        start, stop = arguments_of(node)[2:]
        return found.of(sliced_tokens(mover, found.node, start, stop))
    zeros = sources[0] if len(sources) == 2 else None
    is_whole = zeros is None or (zeros.target is _aten.full.default and is_filled(zeros))
    if found is None:
        raise mover.refused(node, f"{named(node)} has no rule for these places")
    if found.tokens is not None and zeros is None and dim % rank == found.features:
        raise fused(mover, node)
    if not is_whole or dim % rank in (found.tokens, found.features):
        raise mover.refused(node, f"{named(node)} has no rule for this dimension")
    if zeros is None:
        return found.of(mover.emit(node.target, (found.node, *node.args[1:])))
    size = node.meta["val"].shape[dim]
    places = dict(zip(("start", "end", "step"), arguments_of(node)[3:], strict=False))
    start, end, step = (places.get(one) for one in ("start", "end", "step"))
    start, end = start or 0, size if end is None else end
    if step not in (None, 1) or not all(isinstance(one, int) for one in (size, start, end)):
        raise mover.refused(node, f"{named(node)} has no rule for these places")
    start, end = (one + size * (one < 0) for one in (start, end))
    pads = [0, 0] * (rank - 1 - dim % rank) + [start, max(0, size - end)]
    made = mover.emit(_aten.constant_pad_nd.default, (found.node, pads, zeros.args[1]))
    return found.of(made)
