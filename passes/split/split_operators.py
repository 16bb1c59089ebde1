"""Split: run the operators of large weights as slices, one slice after the other.

Needs: a graph with one ``unshard`` and one ``reduce_grad`` per parameter.
Leaves: for each parameter that the plan splits, one ``unshard`` and one ``reduce_grad`` per slice
(named ``weight#0`` and so on), and the dependent operators in slices.

Before::                              After (two slices)::

    w = unshard(p)                        w0 = unshard(part(p, 0), 'w#0')
    h = mm(x, w.t())                      h0 = mm(x, w0.t())
    y = mm(gelu(h), v.t())                y0 = mm(gelu(h0), v0.t())
                                          w1 = unshard(part(p, 1), 'w#1')
                                          h1 = mm(x, w1.t())
                                          y = addmm(y0, gelu(h1), v1.t())

A node runs in slices if one of its inputs is sliced along one dimension and a rule exists
(``passes/split/split_rules.py``). Pointwise operators run once per slice. A product that contracts
the sliced dimension is a sum over the slices. For all other operators the slices are joined.
Slices of a gradient are requested backwards from its reduction: where the gradient is a product of
two whole tensors, one of them is sliced.

All nodes of a slice stand before the nodes of the next slice, so that only one slice is in memory
at a time. ``reorder`` then starts the gathers of the next slice while one slice computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from passes.graph.fx_utils import call, copy_module, once, output_node, remove_dead
from passes.graph.metadata import ANCHOR, GATHERED, GRADIENT_OF, LAYER, RECOMPUTED
from passes.ops.markers import REDUCE_GRAD, UNSHARD, unshard_of
from passes.ops.packing import TRIM_ROWS
from passes.ops.slicing import (
    JOIN_SLICES,
    PAD_SLICE,
    TAKE_PART,
    TAKE_SLICE,
    TRIM_SLICE,
    Slices,
    cut_into,
    slice_name,
)
from passes.split.order_slices import one_slice_after_the_other
from passes.split.split_rules import (
    LAID_OUT,
    Found,
    Sliced,
    along_weight,
    arguments_of,
    is_cheap,
    made_in_slices,
    rule_of,
    wanted_of,
)
from passes.types.context import Context
from passes.types.plan import OF_INPUT, Plan

_aten = torch.ops.aten
#: Metadata keys that a node's slices inherit. Inductor would take other keys of the whole node for
#: the inputs of the slice's operator.
_KEPT = (RECOMPUTED.name, LAYER.name, ANCHOR.name, "nn_module_stack", "stack_trace")


def split(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Split the operators that the plan splits. See the module's docstring."""
    if splits(ctx.plan):
        split_by_plan(gm, ctx)
    return gm


def split_by_plan(gm: fx.GraphModule, ctx: Context) -> Splitter:
    """Split the operators of a graph; returns the splitter, which has run."""
    splitter = Splitter(gm.graph, ctx, _in_slices_at_once(gm, ctx))
    splitter.run()
    return splitter


def _in_slices_at_once(gm: fx.GraphModule, ctx: Context) -> dict[str, tuple[int, Slices]]:
    """By name, the cheap tensors that are made in slices where they are computed.

    They are found by trial runs on copies. Only plans that slice the rows of an input need them.
    """
    rows = [row for row in ctx.plan.parameters if row.slices > 1]
    if all(row.along != OF_INPUT for row in rows):
        return {}

    def found() -> dict[str, tuple[int, Slices]]:
        wanted: dict[str, tuple[int, Slices]] = {}
        while True:
            tried = Splitter(copy_module(gm).graph, ctx, wanted)
            tried.run()
            more = {name: along for name, along in tried.cut_out.items() if name not in wanted}
            if not more:
                return wanted
            wanted.update(more)

    slices = tuple((row.name, row.slices, row.along, row.like, row.decision) for row in rows)
    names = tuple(node.name for node in gm.graph.nodes)
    wanted: dict[str, tuple[int, Slices]] = once(("in slices at once", slices, names), found)
    return wanted


def splits(plan: Plan) -> bool:
    """Whether any parameter is split."""
    return any(row.slices > 1 for row in plan.parameters)


def slices_of(name: str, ctx: Context) -> tuple[int, Slices] | None:
    """The sliced dimension of a parameter and its slices; None: it is not sliced.

    None also if the rows of its input are sliced.
    """
    if name not in ctx.plan:  # a slice is not sliced again
        return None
    row = ctx.plan[name]
    if row.slices == 1 or row.along == OF_INPUT:
        return None
    if row.along == 0:
        cut = ctx.cut(row.decision)
        return 0, cut_into(row.shape[0], row.slices, cut.ranks, cut.hosts)
    if row.like is not None and ctx.plan[row.like].slices == row.slices:
        like = ctx.plan[row.like]
        cut = ctx.cut(like.decision)
        return row.along, cut_into(like.shape[0], like.slices, cut.ranks, cut.hosts)
    return row.along, cut_into(row.shape[row.along], row.slices)


class Splitter:
    """The rewriting of one graph.

    ``sliced``: by node, the slices that replace it.
    ``wanted``: by node, the dimension and the slices in which it is requested. These are the nodes
    that lead to a sliced gradient, and the nodes that the caller requests.
    ``cut_out``: by name, the nodes that were computed whole and then sliced, although computing
    them in slices is cheap.
    ``weights_cut``: in a trial, the weights (not vectors) and their dimensions from which slices
    were cut, directly or out of a product with the weight.
    """

    def __init__(
        self,
        graph: fx.Graph,
        ctx: Context,
        wanted: Mapping[str, tuple[int, Slices]],
        most_cut: int | None = None,
    ) -> None:
        """
        Args:
            wanted: by node name, the dimension and the slices in which the node is requested.
            most_cut: trial run: stop, with the graph half rewritten, once slices are cut from more
                than this many weights. None: no trial.
        """
        self.graph, self.ctx, self.most_cut = graph, ctx, most_cut
        self.sliced: dict[fx.Node, Sliced] = {}
        self.wanted = {node: wanted[node.name] for node in graph.nodes if node.name in wanted}
        self.cut_out: dict[str, tuple[int, Slices]] = {}
        self.weights_cut: dict[tuple[str, int], None] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        self.unjoined: dict[fx.Node, Sliced] = {}  # by joined node, its slices
        #: Slices of weights among the inputs of a backward.
        self.kept = {
            GATHERED.of(node): node
            for node in graph.find_nodes(op="placeholder")
            if GATHERED.is_set(node)
        }
        #: Nodes that read whole tensors.
        self.done = {output_node(graph)}
        #: By new node, the index of its slice.
        self.index: dict[fx.Node, int] = {}
        #: Metadata of the node that is being replaced.
        self.meta: dict[str, Any] = {}

    def run(self) -> None:
        self._ask_for_gradients()
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                continue
            if self.most_cut is not None and len(self.weights_cut) > self.most_cut:
                return
            with self.graph.inserting_before(node):
                if not self._done(node):
                    for source in node.all_input_nodes:
                        if source in self.sliced:
                            node.replace_input_with(source, self.whole(source))
                    self.done.add(node)
        for node in reversed(self.sliced):
            if not node.users:
                self.graph.erase_node(node)
        remove_dead(self.graph)
        one_slice_after_the_other(self.graph, self.index)

    def _ask_for_gradients(self) -> None:
        """Find the nodes that must run in slices so that gradients come in slices."""
        for node in reversed(self.graph.nodes):
            if node.target is REDUCE_GRAD:
                gradient, _, name, *_ = arguments_of(node)
                found = slices_of(name, self.ctx)
                if found is not None:
                    self.wanted[gradient] = found
            elif node in self.wanted and len(node.users) == 1:
                self.wanted.update(wanted_of(node, *self.wanted[node]))

    def _done(self, node: fx.Node) -> bool:
        """Try to replace a node by slices. Returns whether that succeeded."""
        found: Found = None
        self.meta = node.meta
        if node.target is UNSHARD:
            found = self._gathered(node)
        elif node.target is REDUCE_GRAD:
            return self._reduced(node)
        elif node.target is JOIN_SLICES:
            found = self._joined(node)
        else:
            rule = rule_of(node)
            if rule is not None:
                found = rule(self, node)
            if found is None and node in self.wanted:
                found = made_in_slices(self, node, *self.wanted[node])
        if isinstance(found, Sliced):
            self.sliced[node] = found
        elif found is not None:  # a sum over the slices, or one of them
            node.replace_all_uses_with(found)
            self.graph.erase_node(node)
        return found is not None

    def emit(
        self,
        index: int,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Insert a new node of slice ``index``."""
        node = call(self.graph, target, args, kwargs=kwargs)
        node.meta.update((key, self.meta[key]) for key in _KEPT if key in self.meta)
        self.index[node] = index
        return node

    def taken(self, node: fx.Node, dim: int, slices: Slices) -> list[fx.Node]:
        """The slices of a node along a dimension: its own, or slices cut from the whole.

        A cheap node that no operator has read whole so far is computed in slices.
        """
        found = self.sliced.get(node)
        if found is None and self.done.isdisjoint(node.users) and node.op == "call_function":
            made = made_in_slices(self, node, dim, slices)
            if isinstance(made, Sliced):
                self.sliced[node] = found = made
                self.joined[node] = node  # the whole node still exists
        if found is not None and (found.dim, found.slices) == (dim, slices):
            return list(found.nodes)
        if found is None and is_cheap(node):
            self.cut_out[node.name] = dim, slices
        if found is None and self.most_cut is not None:
            self._note_weight(node, dim)
        source = self.whole(node)
        return [self._take(source, dim, slices, index) for index in range(slices.count)]

    def _note_weight(self, node: fx.Node, dim: int) -> None:
        """In a trial, record the weight that decides the size of a node's dimension."""
        origin = along_weight(node, dim)
        if origin is None or origin[0] not in self.ctx.plan:  # no weight, or the slice of one
            return
        if len(self.ctx.plan[origin[0]].shape) > 1:
            self.weights_cut[origin] = None

    def _take(self, node: fx.Node, dim: int, slices: Slices, index: int) -> fx.Node:
        if slices.ranks == 1:
            start = index * slices.strip
            ends = start, min(start + slices.strip, slices.size)
            return self.emit(index, _aten.slice.Tensor, (node, dim, *ends))
        return self.emit(index, TAKE_SLICE, slices.to_take(node, dim, index))

    def whole(self, node: fx.Node) -> fx.Node:
        """The node with the whole value: the node itself, or its joined slices."""
        found = self.sliced.get(node)
        if found is None:
            return node
        if node not in self.joined:
            self.joined[node] = self.join(found)
        return self.joined[node]

    def join(self, found: Sliced) -> fx.Node:
        """Join slices at the insert point."""
        joined = call(self.graph, JOIN_SLICES, found.slices.to_join(found.nodes, found.dim))
        self.unjoined[joined] = found
        return joined

    def rows_of_input(self, node: fx.Node, weight: fx.Node) -> Slices | None:
        """The slices of the input rows of a product; None: the rows are not sliced.

        Rows of a symbolic size are not sliced.

        ``node``: the input. ``weight``: the other operand, as the product reads it.
        """
        while weight.target in LAID_OUT:
            weight = arguments_of(weight)[0]
        name: Any
        name = unshard_of(weight).name if weight.target is UNSHARD else GATHERED.get(weight)
        if name not in self.ctx.plan:
            return None
        row = self.ctx.plan[name]
        if row.slices == 1 or row.along != OF_INPUT:
            return None
        rows = node.meta["val"].shape[0]
        # Slices of a symbolic size would specialize the graph to that size.
        return cut_into(rows, row.slices) if isinstance(rows, int) else None

    def _joined(self, node: fx.Node) -> Sliced:
        """A join: users that work on slices read the slices and not the joined tensor."""
        nodes, dim, size, ranks, hosts = arguments_of(node)
        self.joined[node] = node
        return Sliced(dim, Slices(size, len(nodes), ranks, hosts), nodes)

    def _gathered(self, node: fx.Node) -> Sliced | None:
        """The slices of a parameter: kept ones, and one gather for each of the others."""
        shard, name, shape, sharded, *marks = arguments_of(node)
        found = slices_of(name, self.ctx)
        if found is None:
            return None
        dim, slices = found
        nodes = []
        for index in range(slices.count):
            kept = self.kept.get(slice_name(name, index))
            if kept is not None:
                nodes.append(kept)
                continue
            own = list(shape)
            own[dim] = slices.part(index) if dim else slices.ranks * slices.strip
            part = self._part(shard, dim, slices, index)
            args = (part, slice_name(name, index), own, sharded, *marks)
            gathered = self.emit(index, UNSHARD, args, node.kwargs)
            if not (dim or slices.even):
                gathered = self.emit(index, TRIM_SLICE, slices.to_cut(gathered, index))
            nodes.append(gathered)
        return Sliced(dim, slices, nodes)

    def _part(self, shard: fx.Node, dim: int, slices: Slices, index: int) -> fx.Node:
        """This rank's part of a parameter's slice."""
        if dim:  # a collective needs contiguous memory, and strips of columns are not
            return self.emit(index, TAKE_SLICE, slices.to_take(shard, dim, index))
        start = index * slices.strip
        if slices.even:
            return self.emit(index, _aten.slice.Tensor, (shard, 0, start, start + slices.strip))
        return self.emit(index, TAKE_PART, (shard, start, slices.strip))

    def _reduced(self, node: fx.Node) -> bool:
        """Reduce each slice of a gradient by itself, and join this rank's parts.

        Returns False if the parameter is not sliced.
        """
        gradient, shard, name, sharded, *marks = arguments_of(node)
        found = slices_of(name, self.ctx)
        if found is None:
            return False
        dim, slices = found
        parts = []
        for index, one in enumerate(self.taken(gradient, dim, slices)):
            if not (dim or slices.even):
                one = self.emit(index, PAD_SLICE, slices.to_cut(one, index))
            like = self._part(shard, dim, slices, index)
            args = (one, like, slice_name(name, index), sharded, *marks)
            parts.append(self.emit(index, REDUCE_GRAD, args, node.kwargs))
        # At the end of the graph: a node that needs all slices would separate their nodes.
        with self.graph.inserting_before(output_node(self.graph)):
            if dim:
                joined = self.join(Sliced(dim, slices, parts))
            else:
                joined = call(self.graph, _aten.cat.default, (parts,))
                if not slices.even:
                    joined = call(self.graph, TRIM_ROWS, (joined, shard))
        GRADIENT_OF.set(joined, name)
        node.replace_all_uses_with(joined)
        self.graph.erase_node(node)
        return True
