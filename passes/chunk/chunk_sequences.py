"""Chunk sequences: attention in chunks of whole sequences, which it computes one by one.

Needs: the walk of ``chunk_tokens.py``, at a product whose result an attention reads.
Leaves: the operators up to the output projection, once for each chunk.

Of B sequences a rank, C chunks have B/C each; the first B mod C have one more. The tokens of a rank
stand sequence by sequence, so a chunk is a range of tokens too::

    x0, x1 = x[: T/2], x[T/2 :]                 [B T/2, d]
    q0, k0, v0 = x0 wq, x0 wk, x0 wv            views: [B/2, heads, T, head size]
    y0 = mm(attention(q0, k0, v0), wo)
    ...

A chunk is the graph on fewer sequences. Each of its tensors has the whole one's dimensions, with
sequences outermost: dimension 0 is the sequences, or a multiple of them, as in ``[B T, d]``. The
rules allow operators that compute each sequence by itself. What they read beside it is cut in the
same way if it has values for each sequence, as a mask. Other tensors are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.chunk.chunked import Chunked, is_static
from passes.graph.fx_utils import RESHAPES, bytes_of, is_getitem, tensor_inputs
from passes.graph.op_traits import is_pointwise
from passes.move.heads import ATTENTIONS, MASKS, named_arguments
from passes.move.spread import is_filled
from passes.split.split_rules import PRODUCTS, arguments_of, permuted_dims

if TYPE_CHECKING:
    from passes.chunk.chunk_tokens import Chunker

_aten = torch.ops.aten
#: The fewest dimensions of tensors of heads. Masks with sequences have one more.
_OF_HEADS = 3


def sequences_around(product: fx.Node, ends: Callable[[fx.Node], bool]) -> int:
    """The number of sequences if a group's first product leads to attention; else 0.

    The first search follows the readers up to the next products. The second search begins at those
    of them that end chunks (``ends``), and follows their inputs back. It finds the attention beside
    a gate.
    """
    ahead = _reached(product.users, lambda node: node.users)
    last = [node for node in ahead if node.target in PRODUCTS and ends(node)]
    tokens = [source for node in last for source in node.all_input_nodes if source in ahead]
    behind = _reached(tokens, lambda node: node.all_input_nodes)
    found = [node for node in {**ahead, **behind} if node.target in ATTENTIONS]
    sizes = {_sequences_of(node) for node in found}
    return sizes.pop() if len(sizes) == 1 else 0


def _reached(
    starts: Iterable[fx.Node], next_of: Callable[[fx.Node], Iterable[fx.Node]]
) -> dict[fx.Node, None]:
    """The operators that a search reaches, up to the next products."""
    found: dict[fx.Node, None] = {}
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node in found or node.op != "call_function":
            continue
        found[node] = None
        if node.target not in PRODUCTS:
            stack += next_of(node)
    return found


def _sequences_of(attention: fx.Node) -> int:
    """The number of sequences that an attention reads; 0: it is symbolic."""
    query = named_arguments(attention)["query"]
    return int(query.meta["val"].shape[0]) if is_static(query) else 0


def on_sequences(
    chunker: Chunker, node: fx.Node, own: Mapping[fx.Node, Chunked]
) -> Chunked | fx.Node | None:
    """An operator chunk by chunk of sequences; None: it mixes sequences, or has no rule.

    A sum over sequences becomes the whole sum of the chunks' sums.

    ``own``: its inputs in chunks.
    """
    first = next(iter(own.values()))
    if any(one.sequences != first.sequences for one in own.values()):
        return None
    if node.target is _aten.sum.dim_IntList and not _keeps_sequences(node, own):
        return _total(chunker, node, first)
    sized = _sizes_for_each(node, sum(first.sequences)) if is_static(node) else None
    if sized is None and not _keeps_sequences(node, own):
        return None
    inputs = {}
    for source in node.all_input_nodes:
        parts = own[source].nodes if source in own else _beside(chunker, source, node, first)
        if parts is None:
            return None
        inputs[source] = parts
    nodes = []
    for index, count in enumerate(first.sequences):
        parts_of_one = {source: parts[index] for source, parts in inputs.items()}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), parts_of_one.__getitem__)
        target = node.target
        if sized is not None:
            target, rows, inner = sized
            args = (args[0], [rows * count, *inner])
        nodes.append(chunker.emit(index, target, args, kwargs))
    names = frozenset[str]().union(*(one.names for one in own.values()))
    return Chunked(tuple(nodes), 1, names, sequences=first.sequences)


def _total(chunker: Chunker, node: fx.Node, found: Chunked) -> fx.Node | None:
    """The sum over sequences of tensors of heads, as of a norm's gradient; None: of others.

    Others are joined for the gradient of a weight anyway.
    """
    if found.nodes[0].meta["val"].dim() < _OF_HEADS or node.kwargs:
        return None
    total = chunker.emit(0, node.target, (found.nodes[0], *node.args[1:]))
    for index, one in enumerate(found.nodes[1:], 1):
        part = chunker.emit(index, node.target, (one, *node.args[1:]))
        total = chunker.emit(index, _aten.add.Tensor, (total, part))
    return total


def _sizes_for_each(node: fx.Node, sequences: int) -> tuple[Any, int, list[int]] | None:
    """The operator of a reshape or an expansion, its rows for each sequence, and its other sizes.

    None: it is neither, or the sequences are not outermost in its result.
    """
    if node.target not in RESHAPES and node.target is not _aten.expand.default:
        return None
    source, (rows, *inner) = node.all_input_nodes[0], node.meta["val"].shape
    if node.target is _aten.expand.default:
        is_alike = source.meta["val"].dim() == len(inner) + 1
        is_alike = is_alike and source.meta["val"].shape[0] == rows
        return (node.target, rows // sequences, inner) if is_alike else None
    return None if rows % sequences else (_aten.reshape.default, rows // sequences, inner)


def _keeps_sequences(node: fx.Node, own: Mapping[fx.Node, Chunked]) -> bool:
    """Whether an operator computes each row of dimension 0 by itself, with sizes of its inputs.

    ``own``: its inputs in chunks.
    """
    if is_getitem(node) or node.target in ATTENTIONS:
        return True
    if is_pointwise(node):
        rank = node.meta["val"].dim()
        return all(one.meta["val"].dim() == rank for one in own)
    rule = _OTHER_DIMS.get(node.target)
    return rule is not None and rule(node)


def _along_others(place: int) -> Callable[[fx.Node], bool]:
    """A rule: the dimension, or all dimensions, that an argument names are not 0.

    ``place``: of the argument; if it is left out, it is dimension 0.
    """

    def holds(node: fx.Node) -> bool:
        given = arguments_of(node)[place] if len(node.args) > place else 0
        dims = given if isinstance(given, list | tuple) else [given or 0]
        value = node.all_input_nodes[-1].meta["val"]
        rank = value.dim() + (node.target is _aten.unsqueeze.default)
        return bool(dims) and all(dim % rank for dim in dims)

    return holds


def _pads_others(node: fx.Node) -> bool:
    source, pads, *_ = arguments_of(node)
    return len(pads) < 2 * source.meta["val"].dim() or not any(pads[-2:])


#: By operator, whether it works along other dimensions than 0.
_OTHER_DIMS: dict[Any, Callable[[fx.Node], bool]] = {
    _aten.permute.default: lambda node: permuted_dims(node)[0] == 0,
    _aten.constant_pad_nd.default: _pads_others,
    _aten.slice_scatter.default: _along_others(2),
    **dict.fromkeys(
        (
            _aten.unsqueeze.default,
            _aten.squeeze.dim,
            _aten.slice.Tensor,
            _aten.cat.default,
            _aten.sum.dim_IntList,
            _aten.mean.dim,
            _aten.amax.default,
        ),
        _along_others(1),
    ),
    _aten.split.Tensor: _along_others(2),
}


def _beside(
    chunker: Chunker, source: fx.Node, node: fx.Node, found: Chunked
) -> tuple[fx.Node, ...] | None:
    """For each chunk, what an operator reads of a tensor that is not in chunks; None: no rule.

    ``found``: an input of the operator in chunks.
    """
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_static(source):
        return None
    if source in chunker.chunked:  # not in chunks of these sequences
        return None
    whole, count = (source,) * len(found.nodes), sum(found.sequences)
    if node.target in ATTENTIONS:
        given = named_arguments(node).items()
        is_mask = source in [value for name, value in given if name in MASKS]
        has_sequences = value.dim() >= _OF_HEADS + is_mask and value.shape[0] == count
        return cut(chunker, source, found.sequences) if has_sequences else whole
    result = node.meta["val"].shape
    if value.dim() < len(result) or value.shape[0] == 1:
        return whole
    is_alike = value.dim() == len(result) and value.shape[0] == result[0]
    return cut(chunker, source, found.sequences) if is_alike else None


def cut(chunker: Chunker, node: fx.Node, sequences: tuple[int, ...]) -> tuple[fx.Node, ...]:
    """The chunks of a tensor that is not computed in chunks.

    A pointwise operator or a broadcast that makes more than it reads, as of a mask, is computed
    again for each. Others are sliced.
    """
    known = chunker.again
    if (node, sequences) not in known:
        known[node, sequences] = _cut(chunker, node, sequences)
    return known[node, sequences]


def _cut(chunker: Chunker, node: fx.Node, sequences: tuple[int, ...]) -> tuple[fx.Node, ...]:
    rows, *inner = node.meta["val"].shape
    sizes = [rows // sum(sequences) * count for count in sequences]
    if is_filled(node):
        given = [([size, *inner], *node.args[1:]) for size in sizes]
        return _behind(chunker, node, node.target, given)
    inputs = list(tensor_inputs(node)) if node.op == "call_function" else []
    is_larger = bytes_of(node.meta["val"]) > sum(bytes_of(one.meta["val"]) for one in inputs)
    is_broadcast = node.target is _aten.expand.default
    if not inputs or not is_larger or not (is_broadcast or is_pointwise(node)):
        return chunker.slices(node, 1, sizes)
    rank, parts = len(inner) + 1, {}
    for one in inputs:
        value = one.meta["val"]
        is_cut = value.dim() == rank and value.shape[0] == rows
        parts[one] = cut(chunker, one, sequences) if is_cut else (one,) * len(sizes)
    if is_broadcast:
        given = [(own, [size, *inner]) for own, size in zip(parts[inputs[0]], sizes, strict=True)]
        return _behind(chunker, node, node.target, given)
    given = []
    for index in range(len(sizes)):
        own_parts = {one: own[index] for one, own in parts.items()}
        given.append(fx.node.map_arg(node.args, own_parts.__getitem__))
    return _behind(chunker, node, node.target, given)


def _behind(
    chunker: Chunker, node: fx.Node, target: Any, given: Sequence[tuple[Any, ...]]
) -> tuple[fx.Node, ...]:
    """New nodes directly behind a node, for each chunk."""
    with chunker.graph.inserting_before(node.next):
        return tuple(chunker.made(target, args, node.kwargs) for args in given)
