"""Chunk: products around weights that stay run chunk by chunk of this rank's tokens.

Needs: a step module (``passes/graph/step_module.py``), or the graph of an inference, with one
``unshard`` and one ``reduce_grad`` per parameter.
Leaves: for each group of the plan with ``chunks``, its products in chunks, one after the other.
``CHUNK`` of the slices of tokens that begin a chunk, and of the products that end one.
``NOT_CHUNKED`` of the module: the weights whose tokens travel whole all the same, with the reasons.

Before (a linear, an activation, a linear)::

    h = mm(x, w.t())                      [T, F]
    y = mm(gelu(h), v.t())                [T, d]

After (two chunks)::

    x0, x1 = x[: T/2], x[T/2 :]
    h0 = mm(x0, w.t()); y0 = mm(gelu(h0), v.t())
    h1 = mm(x1, w.t()); y1 = mm(gelu(h1), v.t())
    h, y = cat([h0, h1]), cat([y0, y1])

``move`` then gathers the tokens of each chunk, and adds up the partial sums of each. So the tokens
of a chunk travel while another one computes. Chunks begin at a product of local tokens with columns
of a weight, pass pointwise operators and changes of shape, and end at the product that contracts
the features. All other operators read whole tensors, gradients of weights among them: each is one
product after the last chunk, and needs no memory for its parts.

A product alone (``passes/move/products.py``) begins and ends chunks.

The chunks of attention are whole sequences, and have rules of their own (``chunk_sequences.py``).
A group has them if its first product leads to attention.

T tokens in C chunks: the first T mod C chunks have one token more. The ranks have equal sizes, so
their chunks are equal (``osdp_compile/lowering/agreeing.py``). Symbolic sizes stay whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.chunk.chunk_sequences import on_sequences, sequences_around
from passes.chunk.chunked import Chunked, is_static, joined, sizes_of
from passes.chunk.save_chunks import save_chunks
from passes.graph.fx_utils import RESHAPES, call, remove_dead
from passes.graph.metadata import CHUNK, NOT_CHUNKED
from passes.graph.op_traits import COPIES, is_pointwise
from passes.graph.step_module import graphs_of, rename_saved
from passes.move.move_rules import KEPT
from passes.move.spread import is_filled, named
from passes.ops.markers import UNSHARD, unshard_of, unshards
from passes.split.order_slices import one_slice_after_the_other
from passes.split.split_rules import arguments_of, operands_of, permuted_dims
from passes.types.annotations import Chunk
from passes.types.context import Context, Phase
from passes.types.plan import Plan

_aten = torch.ops.aten


def chunk(step: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Run products of a step in chunks. See the module's docstring."""
    if ctx.moves_activations and (chosen := chunks_of(ctx.plan)):
        graphs = list(graphs_of(step))
        NOT_CHUNKED.set(step, run_in_chunks(graphs, chosen, ctx.plan.alone))
    return step


def chunk_inference(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Run products of the graph of an inference in chunks; other graphs stay as they are."""
    if ctx.phase is Phase.INFERENCE and ctx.moves_activations and (chosen := chunks_of(ctx.plan)):
        NOT_CHUNKED.set(gm, run_in_chunks([gm], chosen, ctx.plan.alone))
    return gm


def chunks_of(plan: Plan) -> dict[str, tuple[int, int]]:
    """By weight in chunks of tokens, the dimension that the ranks share, and the chunks."""
    rows = (row for row in plan.parameters if row.chunks > 1 and len(row.shape) > 1)
    return {row.name: (row.dim, row.chunks) for row in rows}


def run_in_chunks(
    graphs: Sequence[fx.GraphModule],
    chosen: Mapping[str, tuple[int, int]],
    alone: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """Run products in chunks, in a forward and its backward or in one graph.

    ``chosen``: by weight, the dimension that the ranks share, and the number of chunks. ``alone``:
    those whose products are groups of their own.

    Returns the weights whose tokens travel whole in the forward all the same, with the reasons.
    """
    first = Chunker(graphs[0].graph, chosen, alone)
    first.run()
    for gm in graphs[1:]:
        rename_saved(gm.graph.find_nodes(op="placeholder"), first.returned)
        second = Chunker(gm.graph, chosen, alone)
        second.run()
        save_chunks(first.graph, gm.graph, first.joined, second.cut, first.of_sequences)
    read = {unshard_of(node).name for node in unshards(graphs[0].graph)}
    left = sorted(read & chosen.keys() - first.ended)
    return {name: first.stopped.get(name, "it is in no two products of tokens") for name in left}


class Chunker:
    """The rewriting of one graph.

    ``chosen``, ``alone``: as in :func:`run_in_chunks`. ``chunked``: by node of the original graph,
    its chunks. ``ended``: the weights whose chunks reach a last product. ``stopped``: by weight,
    the reason why its chunks do not. ``returned``: by name of a node that the graph returned, the
    name of the node in its place. ``again``: by tensor beside chunks of sequences, its chunks.
    """

    def __init__(
        self, graph: fx.Graph, chosen: Mapping[str, tuple[int, int]], alone: frozenset[str]
    ) -> None:
        self.graph, self.chosen, self.alone = graph, chosen, alone
        self.chunked: dict[fx.Node, Chunked] = {}
        self.ended: set[str] = set()
        self.stopped: dict[str, str] = {}
        self.returned: dict[str, str] = {}
        self._index: dict[fx.Node, int] = {}  # by node of a chunk, the number of the chunk
        self._slices: dict[tuple[fx.Node, int, tuple[int, ...]], tuple[fx.Node, ...]] = {}
        self.again: dict[tuple[fx.Node, tuple[int, ...]], tuple[fx.Node, ...]] = {}
        self._joined: dict[fx.Node, fx.Node] = {}
        self._done: set[fx.Node] = set()  # nodes that read whole tensors
        self._meta: dict[str, Any] = {}  # of the node that is being replaced

    @property
    def joined(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """By whole tensor that is joined of chunks, these chunks."""
        own = self._joined.items()
        return {one: self.chunked[n].nodes for n, one in own if not self.chunked[n].others}

    @property
    def of_sequences(self) -> set[fx.Node]:
        """The whole tensors that are joined of chunks of sequences."""
        return {one for node, one in self._joined.items() if self.chunked[node].sequences}

    @property
    def cut(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """By whole tensor that is cut into chunks, these chunks."""
        return {node: slices for (node, *_), slices in self._slices.items()}

    def run(self) -> None:
        """Rewrite the graph."""
        for node in list(self.graph.nodes):
            if node.op not in ("call_function", "output"):
                continue
            self._meta = node.meta
            with self.graph.inserting_before(node):
                found = self._found(node) if node.op == "call_function" else None
                if isinstance(found, Chunked):
                    self.chunked[node] = found
                elif found is not None:
                    self._replace(node, found)
                else:
                    self._read_whole(node)
                    self._done.add(node)
        for node in reversed(self.chunked):
            if not node.users:
                self.graph.erase_node(node)
        remove_dead(self.graph)
        one_slice_after_the_other(self.graph, self._index)

    def _replace(self, node: fx.Node, whole: fx.Node) -> None:
        """Replace a node by the whole tensor that chunks give."""
        node.replace_all_uses_with(whole)
        self.returned[node.name] = whole.name
        self.graph.erase_node(node)

    def _found(self, node: fx.Node) -> Chunked | fx.Node | None:
        """The chunks of a node, or a node in its place; None: it reads and gives whole tensors."""
        if node.target in (_aten.mm.default, _aten.addmm.default):
            return self._product(node)
        own = {one: self.chunked[one] for one in node.all_input_nodes if one in self.chunked}
        if any(found.sequences for found in own.values()):
            return on_sequences(self, node, own)
        if not own or not is_static(node):
            return None
        if node.target in RESHAPES:
            (found,) = own.values()
            return self._viewed(node, found)
        if any(found.is_end for found in own.values()):
            return self._added(node)
        return self._pointwise(node, own) if is_pointwise(node) else None

    def _read_whole(self, node: fx.Node) -> None:
        """Let a node read whole tensors."""
        for source in node.all_input_nodes:
            if source not in self.chunked:
                continue
            whole = self._whole(source)
            node.replace_input_with(source, whole)
            if node.op == "output":
                self.returned[source.name] = whole.name
            elif not self.chunked[source].is_end:
                what = "sequences" if self.chunked[source].sequences else "tokens"
                reason = f"{named(node)} has no rule for chunks of {what}"
                for name in self.chunked[source].names:
                    self.stopped.setdefault(name, reason)

    def _product(self, node: fx.Node) -> Chunked | None:
        """A product that begins or ends chunks; None: another one."""
        *bias, tokens, other = operands_of(node)
        found, own = self._weight(other), self.chunked.get(tokens)
        rows = any(one.meta["val"].dim() > 1 or one in self.chunked for one in bias)
        if found is None or node.kwargs or rows:
            return None
        name, dim = found
        is_alone = name in self.alone
        sequences: tuple[int, ...] = ()
        if is_alone or (dim == 1 and own is None):
            source = tokens if own is None else self._whole(tokens)
            slices, sequences = self._begun(node, source, name)
            if slices is None:
                return None
            names = frozenset([name])
            self.ended |= names if is_alone else set()
        elif dim == 0 and own is not None and own.lead == 1 and not own.is_end:
            slices, names = own.nodes, own.names | {name}
            self.ended |= names
        else:
            return None
        if dim == 1 and not is_alone:
            given = [(*bias, one, other) for one in slices]
            products = [self.emit(at, node.target, args) for at, args in enumerate(given)]
            return Chunked(tuple(products), 1, names, sequences=sequences)
        products = [self.emit(at, _aten.mm.default, (one, other)) for at, one in enumerate(slices)]
        for index, one in enumerate(products):
            CHUNK.set(one, Chunk(index, len(products)))
        return Chunked(tuple(products), 1, names, is_end=True, others=tuple(bias))

    def _begun(
        self, node: fx.Node, tokens: fx.Node, name: str
    ) -> tuple[tuple[fx.Node, ...] | None, tuple[int, ...]]:
        """The slices of the tokens that a first product reads, and the sequences of each.

        No sequences: the slices are of any tokens. None: the tokens travel whole.
        """
        count = self.chosen[name][1]
        batch = 0 if name in self.alone else sequences_around(node, self._is_last)
        if not batch:
            slices = self._cut(tokens, 1, count)
            if slices is None:
                self.stopped[name] = "its tokens are one, or of any number (dynamic=True)"
            return slices, ()
        rows = tokens.meta["val"].shape[0]
        if batch == 1 or rows % batch:
            self.stopped[name] = "its attention reads one sequence a rank"
            return None, ()
        sequences = sizes_of(batch, count)
        return self.slices(tokens, 1, [rows // batch * one for one in sequences]), tuple(sequences)

    def _is_last(self, node: fx.Node) -> bool:
        """Whether a product contracts features of a weight in chunks."""
        found = self._weight(operands_of(node)[-1])
        return found is not None and found[1] == 0 and found[0] not in self.alone

    def _weight(self, node: fx.Node) -> tuple[str, int] | None:
        """The weight that a product reads, and the operand's dimension that the ranks share.

        None: it reads no weight in chunks.
        """
        is_turned = False
        while node.target is not UNSHARD:
            if node.target is _aten.permute.default and permuted_dims(node) == [1, 0]:
                is_turned = not is_turned
            elif node.target not in COPIES:
                return None
            node = arguments_of(node)[0]
        name = unshard_of(node).name
        if name not in self.chosen:
            return None
        dim = self.chosen[name][0]
        return name, 1 - dim if is_turned else dim

    def _viewed(self, node: fx.Node, found: Chunked) -> Chunked | None:
        """A reshape that keeps tokens and features apart; None: another one."""
        (source, *_), shape = node.all_input_nodes, node.meta["val"].shape
        tokens = math.prod(source.meta["val"].shape[: found.lead])
        lead = _lead(shape, tokens)
        if lead is None or found.others:
            return None
        inner, nodes = list(shape[lead:]), list(found.nodes)
        if inner != list(nodes[0].meta["val"].shape[1:]):
            nodes = [
                self.emit(index, _aten.reshape.default, (one, [one.meta["val"].shape[0], *inner]))
                for index, one in enumerate(nodes)
            ]
        return dataclasses.replace(found, nodes=tuple(nodes), lead=lead)

    def _pointwise(self, node: fx.Node, own: Mapping[fx.Node, Chunked]) -> Chunked | None:
        """A pointwise operator on tensors in equal chunks; None: it reads others too."""
        first, *others = own.values()
        names = first.names.union(*(one.names for one in others))
        return self._each(node, first.lead, len(first.nodes), names)

    def _added(self, node: fx.Node) -> Chunked | None:
        """The sum of last products, as of a gated MLP's backward; None: another operator.

        Whole tensors are added to the whole sum.
        """
        inputs = node.all_input_nodes
        if node.target is not _aten.add.Tensor or node.kwargs or len(inputs) != 2:
            return None
        if any(_kind(one) != _kind(node) for one in inputs):
            return None
        own = [self.chunked[one] for one in inputs if one in self.chunked]
        others = tuple(one for one in inputs if one not in self.chunked)
        first = own[0]
        if len(own) == 1:
            return dataclasses.replace(first, others=first.others + others)
        shapes = {(one.lead, *(chunk.meta["val"].shape for chunk in one.nodes)) for one in own}
        if not all(one.is_end for one in own) or len(shapes) > 1:
            return None
        sums = []
        for index, pair in enumerate(zip(*(one.nodes for one in own), strict=True)):
            sums.append(self.emit(index, node.target, pair))
            for one in pair:  # they are added up with the sum
                CHUNK.pop(one)
            CHUNK.set(sums[-1], Chunk(index, len(first.nodes)))
        names, others = first.names | own[1].names, first.others + own[1].others
        return Chunked(tuple(sums), first.lead, names, True, others)

    def _each(self, node: fx.Node, lead: int, count: int, names: frozenset[str]) -> Chunked | None:
        """A pointwise operator chunk by chunk; None: it reads tensors that have no such chunks."""
        inputs = {}
        for source in node.all_input_nodes:
            parts = self._beside(source, node.meta["val"].shape, lead, count, names)
            if parts is None:
                return None
            inputs[source] = parts
        nodes = []
        for index in range(count):
            own = {source: parts[index] for source, parts in inputs.items()}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), own.__getitem__)
            nodes.append(self.emit(index, node.target, args, kwargs))
        return Chunked(tuple(nodes), lead, names)

    def _beside(
        self,
        node: fx.Node,
        shape: Sequence[int],
        lead: int,
        count: int,
        names: frozenset[str],
    ) -> tuple[fx.Node, ...] | None:
        """For each chunk, what a pointwise operator reads of a tensor; None: no rule.

        ``shape``: the operator's whole result. ``lead``: the number of its dimensions of tokens.
        """
        own = self.chunked.get(node)
        if own is not None:
            is_equal = not own.is_end and (own.lead, len(own.nodes)) == (lead, count)
            is_equal = is_equal and not own.sequences
            is_equal = is_equal and node.meta["val"].dim() == len(shape)
            return own.nodes if is_equal and node.meta["val"].shape[:lead] == shape[:lead] else None
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not is_static(node):
            return None
        tokens = value.shape[: max(0, lead - len(shape) + value.dim())]
        inner = list(value.shape[len(tokens) :])
        if not tokens:
            return (node,) * count
        if all(size == 1 for size in tokens):
            return (self.made(_aten.reshape.default, (node, inner)),) * count
        if tuple(tokens) != tuple(shape[:lead]):
            return None
        if is_filled(node):  # as in other graphs, and not the slice of a constant
            sizes = sizes_of(math.prod(tokens), count)
            return tuple(
                self.made(node.target, ([size, *inner], *node.args[1:]), node.kwargs)
                for size in sizes
            )
        return self._again(node, lead, count, names) or self._cut(*_unviewed(node, lead), count)

    def _again(
        self, node: fx.Node, lead: int, count: int, names: frozenset[str]
    ) -> tuple[fx.Node, ...] | None:
        """The chunks of a pointwise operator before, if nothing has read it whole; else None."""
        if node.op != "call_function" or not is_pointwise(node):
            return None
        if not self._done.isdisjoint(node.users):
            return None
        self._done.discard(node)  # what it reads need not be whole
        made = self._each(node, lead, count, names)
        if made is None:
            self._done.add(node)
            return None
        self.chunked[node] = made
        return made.nodes

    def _cut(self, node: fx.Node, lead: int, count: int) -> tuple[fx.Node, ...] | None:
        """The slices of a whole tensor's tokens, directly after it; None: it has one token."""
        shape = node.meta["val"].shape
        tokens = math.prod(shape[:lead])
        if not is_static(node) or tokens < 2:
            return None
        return self.slices(node, lead, sizes_of(tokens, count))

    def slices(self, node: fx.Node, lead: int, sizes: Sequence[int]) -> tuple[fx.Node, ...]:
        """The slices of a whole tensor's tokens of these sizes, directly after it."""
        key = node, lead, tuple(sizes)
        if key not in self._slices:
            flat, place = node, node.next
            while place.op == "placeholder":
                place = place.next
            start, nodes = 0, []
            with self.graph.inserting_before(place):
                if lead > 1:
                    shape = node.meta["val"].shape
                    flat = self.made(_aten.reshape.default, (node, [sum(sizes), *shape[lead:]]))
                for index, size in enumerate(sizes):
                    nodes.append(self.made(_aten.slice.Tensor, (flat, 0, start, start + size)))
                    CHUNK.set(nodes[-1], Chunk(index, len(sizes)))
                    start += size
            self._slices[key] = tuple(nodes)
        return self._slices[key]

    def _whole(self, node: fx.Node) -> fx.Node:
        """A whole tensor, of its chunks."""
        if node not in self._joined:
            found, shape = self.chunked[node], list(node.meta["val"].shape)
            if found.sequences:
                self._joined[node] = joined(self.made, node, found.nodes)
                return self._joined[node]
            whole = self.made(_aten.cat.default, (list(found.nodes),))
            if list(whole.meta["val"].shape) != shape:
                whole = self.made(_aten.reshape.default, (whole, shape))
            for one in found.others:
                other = self._whole(one) if one in self.chunked else one
                whole = self.made(_aten.add.Tensor, (whole, other))
            self._joined[node] = whole
        return self._joined[node]

    def emit(self, index: int, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """A new node of a chunk."""
        node = self.made(target, args, kwargs)
        self._index[node] = index
        return node

    def made(self, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """A new node, with metadata of the original one."""
        node = call(self.graph, target, args, kwargs=kwargs)
        node.meta.update((key, self._meta[key]) for key in KEPT if key in self._meta)
        return node


def _kind(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.dtype


def _lead(shape: Sequence[int], tokens: int) -> int | None:
    """The number of first dimensions that are tokens; None: their sizes do not multiply to that.

    >>> _lead([3, 5, 16], 15), _lead([15, 16], 15), _lead([3, 80], 15)
    (2, 1, None)
    """
    found = (count for count in range(1, len(shape) + 1) if math.prod(shape[:count]) == tokens)
    return next(found, None)


def _unviewed(node: fx.Node, lead: int) -> tuple[fx.Node, int]:
    """A tensor before its reshapes of tokens, and its number of dimensions of tokens."""
    while node.target in RESHAPES:
        source, shape = arguments_of(node)[0], node.meta["val"].shape
        before = _lead(source.meta["val"].shape, math.prod(shape[:lead]))
        if before is None or source.meta["val"].shape[before:] != shape[lead:]:
            break
        node, lead = source, before
    return node, lead
