"""Move rules: the placement of every tensor of a graph whose weights stay where they are.

A walk in the order of the graph gives each tensor a placement (``passes/move/placed.py``). Rules by
operator, in the files of this folder:

========================  =======================================================================
``products.py``           matrix products gather tokens, or become partial sums
``tables.py``             embeddings of shared rows; ``bags.py``: of ``EmbeddingBag``
``experts.py``            products of stacked weights
``heads.py``              attention by heads
``pointwise.py``          pointwise operators; ``spread.py``: the local tensors that they read
``reductions.py``         sums, means, the largest features, and a lookup of one feature a token
``layouts.py``            other shapes, orders and slices
``token_collectives.py``  the collectives that the rules need
========================  =======================================================================

The ranks add up a partial sum, and each gets its own tokens back, which are local. Partial sums
that are added are added up once. Any other operator on a placed tensor is refused.

The partial sum of a chunk of tokens (``passes/chunk/chunk_tokens.py``) is added up where it is
made, so that it travels while the next chunk computes. That of the last chunk is added up where it
is read, behind the gradients of weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.fx_utils import RESHAPES, call, compact, output_node
from passes.graph.metadata import ANCHOR, CHUNK, GRADIENT_OF, LAYER, RECOMPUTED
from passes.graph.op_traits import is_pointwise
from passes.graph.step_module import saved_name
from passes.move.bags import BAGS, bagged, element
from passes.move.experts import STACKED, stacked
from passes.move.heads import ATTENTIONS, attended
from passes.move.layouts import (
    expanded,
    joined,
    permuted,
    sliced,
    split,
    squeezed,
    unsqueezed,
    viewed,
)
from passes.move.placed import PartialSum, Placed, Refused
from passes.move.pointwise import pointwise, shared, shared_gradient
from passes.move.products import lone_gradient, lone_product, lone_products, product
from passes.move.reductions import looked_up, maximum, reduced, summed
from passes.move.spread import constants_of, named
from passes.move.tables import PUTS, embedded, table_gradient
from passes.move.token_collectives import KeptTokens, combined
from passes.ops.markers import REDUCE_GRAD, UNSHARD, reduce_grad_of, unshard_of
from passes.ops.packing import SUM_RANKS
from passes.shard.lower_markers import all_reduced, cast, cast_after_wait
from passes.split.split_rules import arguments_of
from passes.types.context import Context
from passes.types.plan import Collective
from passes.types.shard_layout import ShardLayout

_aten = torch.ops.aten
#: Metadata of a node that its placed form inherits.
KEPT = (
    RECOMPUTED.name,
    LAYER.name,
    ANCHOR.name,
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
)


class Mover:
    """The rewriting of one graph.

    ``placed``: by node of the original graph, its placed form. ``partial``: its partial sum.
    ``replaced``: by name of a node that is no more, the name of the node in its place.
    ``dims``: by parameter, the dimension that the ranks share. ``alone``: the weights whose
    products are groups of their own. ``lone``: the products of their gradients (``products.py``);
    ``lone_totals``: these for the tokens of all ranks. ``layout``: the parts of the ranks that
    share the weights; ``ranks``: their number; ``group``: their process group. ``between``: the
    process group of the ranks with the same parts on other hosts; "": there are none. ``totals``:
    the sums of partial sums, in graph order. ``gradients``: the gradients of weights that stay,
    each with the nodes that add it up between hosts. ``spreads``: local
    tensors in other placements. ``constants``: tensors that numbers of the graph alone make.
    ``equal``: these, and tensors of gathered weights; they are equal on all ranks. So are the saved
    tensors that the argument ``equal`` names.
    ``gathered``: by local tensor, the tokens of all ranks. ``kept``: those of the forward that the
    backward reads; None: it gathers them again. ``stacks``: the same of experts. ``exchanged``: by
    local tensor, this rank's features of the tokens of all ranks.
    ``purposes``: by direction and weight, the number of its collectives of tokens. ``flat_ids``:
    by tensor of ids, its flat form.
    ``meta``: of the original node that new nodes belong to.
    """

    def __init__(
        self,
        graph: fx.Graph,
        dims: Mapping[str, int],
        ctx: Context,
        inputs: Mapping[fx.Node, Placed],
        layout: ShardLayout,
        kept: KeptTokens | None = None,
        alone: frozenset[str] = frozenset(),
        equal: Collection[str] = (),
    ) -> None:
        self.graph, self.dims, self.ctx, self.kept = graph, dims, ctx, kept
        self.alone, self.lone = alone, lone_products(graph, dims, alone)
        self.lone_totals: dict[fx.Node, fx.Node] = {}
        self.layout, self.ranks, self.group = layout, layout.ranks, layout.group_name
        self.between = layout.between
        self.placed: dict[fx.Node, Placed] = dict(inputs)
        self.partial: dict[fx.Node, PartialSum] = {}
        self.replaced: dict[str, str] = {}
        self.totals: list[fx.Node] = []
        self.gradients: dict[fx.Node, list[fx.Node]] = {}
        self.spreads: dict[tuple[Any, ...], fx.Node | None] = {}
        self.gathered: dict[fx.Node, fx.Node] = {}
        self.stacks: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.exchanged: dict[fx.Node, fx.Node] = {}
        self.purposes: dict[tuple[bool, str], int] = {}
        self.flat_ids: dict[fx.Node, fx.Node] = {}
        self.meta: dict[str, Any] = {}
        self.constants = constants_of(graph)
        same = [one for one in graph.find_nodes(op="placeholder") if saved_name(one) in equal]
        self.equal = constants_of(graph, {UNSHARD}, same)
        self.output = output_node(graph)

    def run(self) -> None:
        """Rewrite the graph, all but its output.

        Raises:
            Refused: for an operator without a rule.
        """
        for node in list(self.graph.nodes):
            if node.op in ("call_function", "output"):
                before, behind = node.prev, node.next
                with self.graph.inserting_before(node):
                    self._rewrite(node)
                _set_layer(node, before, behind)
        for node in reversed({**self.placed, **self.partial}):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)

    def _rewrite(self, node: fx.Node) -> None:
        """Place a node, or replace it by a local one; most nodes stay as they are."""
        if self._is_added_up_later(node) or node.op == "output":
            return
        is_weight = node.target is UNSHARD and unshard_of(node).name in self.dims
        is_gradient = node.target is REDUCE_GRAD and reduce_grad_of(node).name in self.dims
        reads = any(one in self.placed for one in node.all_input_nodes)
        if node in self.lone:
            self.meta = node.meta
            self.lone_totals[node] = lone_product(self, node)
            return
        if not (is_weight or is_gradient or reads):
            return
        self.meta = node.meta
        found = self._found(node, is_weight)
        if found is node:
            return
        if isinstance(found, Placed):
            self.placed[node] = found
        elif isinstance(found, PartialSum):
            self._set_partial(node, found)
        else:
            self._replace(node, found)
            self.graph.erase_node(node)

    def _set_partial(self, node: fx.Node, found: PartialSum) -> None:
        self.partial[node] = found
        if _is_early(node):
            self._replace(node, self._added_up(found, node))

    def _replace(self, node: fx.Node, by: fx.Node) -> None:
        node.replace_all_uses_with(by)
        self.replaced[node.name] = by.name

    def _found(self, node: fx.Node, is_weight: bool) -> Placed | PartialSum | fx.Node:
        if is_weight:
            return self._weight(node)
        if node.target is REDUCE_GRAD:
            return self._gradient(node)
        if any(one in self.placed and self.placed[one].is_share for one in node.all_input_nodes):
            return shared(self, node)
        rule = _RULES.get(node.target)
        if rule is None and is_pointwise(node):
            rule = pointwise
        found = None if rule is None else rule(self, node)
        if found is None:
            raise self.refused(node, f"{named(node)} has no rule")
        return found

    def _weight(self, node: fx.Node) -> Placed:
        """A weight: the own shard in the type in which it is read."""
        marker = unshard_of(node)
        shard = cast(self.graph, marker.shard, node.meta["val"].dtype)
        return Placed(shard, None, self.dims[marker.name], frozenset([marker.name]))

    def _gradient(self, node: fx.Node) -> fx.Node:
        """The gradient of a weight's shard: summed over all tokens, it needs the mean only."""
        marker = reduce_grad_of(node)
        found = self.placed.get(marker.gradient)
        if marker.name not in self.dims:
            return shared_gradient(self, node)
        if found is None:
            total = lone_gradient if marker.name in self.alone else table_gradient
            return self._mean(total(self, node), node)
        if not found.is_total or found.features != self.dims.get(marker.name):
            raise self.refused(node, f"the gradient of {marker.name} is not the slice that stays")
        return self._mean(found.node, node)

    def _mean(self, total: fx.Node, node: fx.Node) -> fx.Node:
        """The mean over all ranks of a total: reduced between hosts only, if there are any."""
        dtype, travels = node.meta["val"].dtype, node.kwargs.get("reduce_dtype")
        if not self.between or not isinstance(travels, torch.dtype):
            travels = dtype
        own = cast(self.graph, total, travels)
        mean = self.emit(_aten.mul.Tensor, (own, 1.0 / self.ctx.world_size))
        if not mean.meta["val"].is_contiguous():
            mean = compact(self.graph, mean)
        name, found = reduce_grad_of(node).name, mean
        self.gradients[mean] = []
        if self.between:
            purpose = Collective((name,), gathers=False)
            wait = all_reduced(self.graph, mean, self.between, purpose)
            found = cast_after_wait(self.graph, wait, dtype)
            self.gradients[mean] = list(dict.fromkeys((*wait.all_input_nodes, wait, found)))
        GRADIENT_OF.set(found, name)
        return found

    def _is_added_up_later(self, node: fx.Node) -> bool:
        """Take a node into a partial sum if it only adds to it; else add up those that it reads."""
        own = [one for one in node.all_input_nodes if one in self.partial]
        if not own:
            return False
        self.meta = node.meta
        alone = all(len(one.users) == 1 for one in own)
        found = self._added(node) if alone else None
        if found is not None:
            self._set_partial(node, found)
            return True
        for source in own:
            self._replace(source, self._added_up(self.partial[source], source))
        return False

    def _added(self, node: fx.Node) -> PartialSum | None:
        """The partial sum of an addition, or of a change of shape; None: of another operator."""
        value: Any = node.meta["val"] if node.op == "call_function" else None
        if node.target in RESHAPES and node.args[0] in self.partial:
            source: Any = node.args[0]
            found = self.partial[source]
            if found.back is not None:
                return None
            shape, sizes = list(value.shape), list(arguments_of(node)[1])
            whole, last = _kind(source), source.meta["val"].shape[-1:]
            turned = []
            for one in found.others:
                if _kind(one) == whole:
                    turned.append(self.emit(_aten.reshape.default, (one, sizes)))
                elif list(last) == list(one.meta["val"].shape) == shape[-1:]:  # a bias
                    turned.append(one)
                else:
                    return None
            part = self.emit(_aten.reshape.default, (found.part, self.of_all(sizes, shape)))
            return PartialSum(part, tuple(sizes), tuple(turned), found.names)
        if node.target is not _aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
            return None
        if any(one in self.placed or _kind(one) != _kind(node) for one in node.all_input_nodes):
            return None
        parts = [self.partial[one] for one in node.all_input_nodes if one in self.partial]
        if len({one.back for one in parts}) > 1:
            return None
        others = [one for one in node.all_input_nodes if one not in self.partial]
        part = parts[0].part
        for other in parts[1:]:
            part = self.emit(_aten.add.Tensor, (part, other.part))
        names = frozenset(name for one in parts for name in one.names)
        others += [other for one in parts for other in one.others]
        return PartialSum(part, parts[0].sizes, tuple(others), names, parts[0].back)

    def _added_up(self, found: PartialSum, node: fx.Node) -> fx.Node:
        """The own tokens of the sum of all ranks' parts, with the local tensors added."""
        if found.back is not None:
            total = found.back(self, found)
        else:
            total = combined(self, found.part, found.sizes, found.names, SUM_RANKS)
        if not _is_early(node):
            self.totals.append(total)
        for one in found.others:
            total = self.emit(_aten.add.Tensor, (total, one))
        return total

    def of_all(self, sizes: Sequence[Any], shape: Sequence[Any]) -> list[Any]:
        """The sizes of a reshape for the tokens of all ranks; ``shape``: the local result."""
        first = shape[0] * self.ranks if isinstance(shape[0], int) else -1
        return [first, *sizes[1:]]

    def own_sizes(self, node: fx.Node) -> list[Any]:
        """A node's sizes as arguments of a reshape, with tokens outermost."""
        sizes = node.meta["val"].shape[1:]
        if not all(isinstance(size, int) for size in sizes):
            raise self.refused(node, f"{named(node)} has symbolic sizes (dynamic=True)")
        return [-1, *sizes]

    def divides(self, size: int | torch.SymInt) -> bool:
        """Whether the ranks divide a size, so that their parts are equal."""
        return isinstance(size, int) and size % self.ranks == 0

    def zeros(self, sizes: list[int], like: Tensor) -> fx.Node:
        """Zeros of these sizes, with the dtype and the device of a tensor."""
        kind = {"dtype": like.dtype, "layout": torch.strided, "device": like.device}
        return self.emit(_aten.full.default, (sizes, 0), {**kind, "pin_memory": False})

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """A new node, with metadata of the original one."""
        node = call(self.graph, target, args, kwargs=kwargs)
        node.meta.update((key, self.meta[key]) for key in KEPT if key in self.meta)
        return node

    def refused(self, node: fx.Node, reason: str, needs: Sequence[tuple[str, int]] = ()) -> Refused:
        """The error for an operator, with the weights that lead to it."""
        own = [self.placed[one] for one in node.all_input_nodes if one in self.placed]
        adds = node.target is _aten.add.Tensor and len(node.all_input_nodes) == 2
        return Refused(reason, frozenset().union(*(one.names for one in own)), needs, adds)


#: By operator, the placement of its result; None: these arguments have no rule.
_RULES: dict[Any, Callable[[Mover, fx.Node], Placed | PartialSum | fx.Node | None]] = {
    _aten.mm.default: product,
    _aten.addmm.default: product,
    **dict.fromkeys(STACKED, stacked),
    **dict.fromkeys(RESHAPES, viewed),
    **dict.fromkeys(ATTENTIONS, attended),
    **dict.fromkeys(PUTS, shared),
    _aten.split.Tensor: split,
    operator.getitem: element,
    BAGS: bagged,
    _aten.embedding.default: embedded,
    _aten.permute.default: permuted,
    _aten.unsqueeze.default: unsqueezed,
    _aten.squeeze.dim: squeezed,
    _aten.expand.default: expanded,
    _aten.cat.default: joined,
    _aten.sum.dim_IntList: summed,
    _aten.mean.dim: summed,
    _aten.slice.Tensor: sliced,
    _aten.slice_scatter.default: sliced,
    _aten.amax.default: maximum,
    _aten.any.dim: reduced,
    _aten.gather.default: looked_up,
}


def _is_early(node: fx.Node) -> bool:
    """Whether a node is the last product, or sum, of a chunk, and another chunk follows."""
    return CHUNK.is_set(node) and not CHUNK.of(node).is_last


def _set_layer(node: fx.Node, before: fx.Node, behind: fx.Node) -> None:
    """Give the new nodes in place of a node its layer.

    ``before``, ``behind``: the nodes around it.
    """
    layer = LAYER.get(node)
    new = before.next
    while layer is not None and new is not behind:
        LAYER.set(new, layer)
        new = new.next


def _kind(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return tuple(value.shape), value.dtype
