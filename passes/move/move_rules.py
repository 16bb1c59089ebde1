"""Move rules: the placement of every tensor of a graph whose weights stay where they are.

A tensor is one of these, with N ranks:

==========  =====================================================================================
local       this rank's own, as in the data-parallel graph (no placement)
a weight    this rank's slice along ``features``
tokens      the tokens of all ranks along ``tokens``, this rank's slice along ``features``
a total     this rank's slice along ``features``, summed over the tokens of all ranks
a share     this rank's part of a sum over the tokens of all ranks and over ``features``
==========  =====================================================================================

A product of local tokens with a weight's columns gathers the tokens first. A product that contracts
the sliced dimension is a partial sum, and so is a sum over it: the ranks add it up, and each gets
its own tokens back, which are local. Partial sums that are added are added up once. Pointwise
operators, sums over tokens and changes of layout keep the placement. The largest features, and a
lookup of one feature a token: ``passes/move/reductions.py``. A local tensor that is read beside a
placed one is spread (``passes/move/spread.py``). Any other operator on a placed tensor is refused.

An embedding looks up the ids of all tokens in its rows of the table: another partial sum. Its
gradient is a total of the gathered gradients.

A total takes the place of this rank's own sum, which is another value. So it may only become the
gradient of a weight, by linear operators: the mean over ranks of linear functions of the own sums
is the function of the total, divided by N. A share takes the place of the own sum too: the sum over
ranks of both is equal. So it may only become the gradient of a weight that the ranks reduce.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.annotate.collectives import by_all_to_all
from passes.graph.fx_utils import (
    ALL_TO_ALL,
    REDUCE_SCATTER,
    always_equal,
    bytes_of,
    call,
    compact,
    output_node,
    set_value,
)
from passes.graph.metadata import GRADIENT_OF, RECOMPUTED
from passes.move.bags import BAGS, PUT_IN_BAGS, bagged, put_in_bags
from passes.move.heads import ATTENTIONS, attended, origin
from passes.move.layouts import (
    VIEWS,
    element_of,
    expanded,
    joined,
    permuted,
    split,
    squeezed,
    unsqueezed,
    viewed,
)
from passes.move.reductions import looked_up, maximum
from passes.move.spread import COPIES, Frame, constants_of, is_filled, is_pointwise, named, spread
from passes.ops.markers import REDUCE_GRAD, UNSHARD, reduce_grad_of, unshard_of
from passes.ops.p2p import EXCHANGE
from passes.ops.packing import SUM_RANKS
from passes.ops.slicing import slice_name
from passes.ops.tables import PUT_ROWS, TAKE_ROWS, TOKENS_OF
from passes.shard.lower_markers import after_wait, cast, flat, gather, reduce_rows
from passes.split.split_rules import (
    arguments_of,
    operands_of,
    permuted_dims,
    size_along,
)
from passes.types.context import Context
from passes.types.plan import Collective

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_MASKED = _aten._unsafe_masked_index_put_accumulate.default
_PUTS = {_MASKED, _aten.index_put.default}
#: Metadata of a node that its placed form inherits.
_KEPT = (RECOMPUTED.name, "nn_module_stack", "fwd_nn_module_stack", "stack_trace")


@dataclasses.dataclass(frozen=True)
class Placed:
    """A tensor that is not local.

    ``node``: in the rewritten graph. ``tokens``: the dimension of the tokens of all ranks; None:
    it has none. ``features``: the dimension that this rank has a slice of. ``names``: the weights
    that it comes from. ``is_total``: it is a sum over the tokens of all ranks. ``is_share``: it is
    a part of one over tokens and features; it has neither.
    """

    node: fx.Node
    tokens: int | None
    features: int
    names: frozenset[str]
    is_total: bool = False
    is_share: bool = False

    @property
    def is_weight(self) -> bool:
        """Whether it has no values of tokens."""
        return self.tokens is None and not self.is_total

    def of(self, node: fx.Node) -> Placed:
        """The same placement of another node."""
        return dataclasses.replace(self, node=node)


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """A local tensor that the ranks have not added up yet.

    ``part``: this rank's part, for the tokens of all ranks. ``sizes``: of the local tensor, as
    arguments of a reshape. ``others``: local tensors to add.
    """

    part: fx.Node
    sizes: tuple[Any, ...]
    others: tuple[fx.Node, ...]
    names: frozenset[str]


class Refused(ValueError):
    """An operator has no rule. The weights that lead to it cannot stay where they are.

    ``needs``: weights, with their dimensions, that would have to stay too.
    """

    def __init__(
        self,
        reason: str,
        names: frozenset[str] = frozenset(),
        needs: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.names = names
        self.needs = tuple(needs)


class Mover:
    """The rewriting of one graph.

    ``placed``: by node of the original graph, its placed form. ``partial``: its partial sum.
    ``dims``: by parameter, the dimension that the ranks share. ``totals``: the sums of partial
    sums, in graph order. ``gradients``: the gradients of weights that stay. ``spreads``: local
    tensors in other placements. ``constants``: tensors that numbers of the graph alone make.
    ``equal``: these, and tensors of gathered weights; they are equal on all ranks.
    """

    def __init__(
        self,
        graph: fx.Graph,
        dims: Mapping[str, int],
        ctx: Context,
        inputs: Mapping[fx.Node, Placed],
    ) -> None:
        self.graph, self.dims, self.ctx = graph, dims, ctx
        self.ranks = ctx.world_size
        self.placed: dict[fx.Node, Placed] = dict(inputs)
        self.partial: dict[fx.Node, PartialSum] = {}
        self.totals: list[fx.Node] = []
        self.gradients: list[fx.Node] = []
        self._gathered: dict[fx.Node, fx.Node] = {}
        self._made: dict[fx.Node, fx.Node] = {}
        self.spreads: dict[tuple[Any, ...], fx.Node | None] = {}
        self.constants = constants_of(graph)
        self.equal = constants_of(graph, {UNSHARD})
        self.output = output_node(graph)
        self._purposes: dict[tuple[bool, str], int] = {}
        self._meta: dict[str, Any] = {}

    def run(self) -> None:
        """Rewrite the graph, all but its output.

        Raises:
            Refused: for an operator without a rule.
        """
        for node in list(self.graph.nodes):
            if node.op in ("call_function", "output"):
                with self.graph.inserting_before(node):
                    self._rewrite(node)
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
        if not (is_weight or is_gradient or reads):
            return
        self._meta = node.meta
        found = self._found(node, is_weight)
        if found is node:
            return
        if isinstance(found, Placed):
            self.placed[node] = found
        elif isinstance(found, PartialSum):
            self.partial[node] = found
        else:
            node.replace_all_uses_with(found)
            self.graph.erase_node(node)

    def _is_added_up_later(self, node: fx.Node) -> bool:
        """Take a node into a partial sum if it only adds to it; else add up those that it reads."""
        own = [one for one in node.all_input_nodes if one in self.partial]
        if not own:
            return False
        self._meta = node.meta
        alone = all(len(one.users) == 1 for one in own)
        found = self._added(node) if alone else None
        if found is not None:
            self.partial[node] = found
            return True
        for source in own:
            source.replace_all_uses_with(self._added_up(self.partial[source], source))
        return False

    def _added(self, node: fx.Node) -> PartialSum | None:
        """The partial sum of an addition, or of a change of shape; None: of another operator."""
        value: Any = node.meta["val"] if node.op == "call_function" else None
        if node.target in VIEWS and node.args[0] in self.partial:
            source: Any = node.args[0]
            found = self.partial[source]
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
        others = [one for one in node.all_input_nodes if one not in self.partial]
        part = parts[0].part
        for other in parts[1:]:
            part = self.emit(_aten.add.Tensor, (part, other.part))
        names = frozenset(name for one in parts for name in one.names)
        others += [other for one in parts for other in one.others]
        return PartialSum(part, parts[0].sizes, tuple(others), names)

    def of_all(self, sizes: Sequence[Any], shape: Sequence[Any]) -> list[Any]:
        """The sizes of a reshape for the tokens of all ranks; ``shape``: the local result."""
        first = shape[0] * self.ranks if isinstance(shape[0], int) else -1
        return [first, *sizes[1:]]

    def _embedded(self, node: fx.Node) -> PartialSum:
        """Rows of the own part of a table for the ids of all tokens."""
        table, ids, *_ = arguments_of(node)
        found = self.placed.get(table)
        if found is None or not found.is_weight or found.features != 0:
            raise self.refused(node, f"{named(node)} reads a table that is not sliced by words")
        rows, total = found.node.meta["val"].shape[0], table.meta["val"].shape[0]
        everything = self.all_tokens(self._flat(ids), node, found.names)
        args = (found.node, everything, self.ctx.rank * rows, total)
        sizes = (*self.sizes_of(ids), table.meta["val"].shape[1])
        return PartialSum(self.emit(TAKE_ROWS, args), sizes, (), found.names)

    def _flat(self, ids: fx.Node) -> fx.Node:
        """Ids as tokens without further dimensions."""
        if ids.meta["val"].dim() == 1:
            return ids
        return self._once(ids, lambda: self.emit(_aten.reshape.default, (ids, [-1])))

    def _once(self, node: fx.Node, make: Callable[[], fx.Node]) -> fx.Node:
        """A node that is made once of another one."""
        if node not in self._made:
            self._made[node] = make()
        return self._made[node]

    def sizes_of(self, node: fx.Node) -> list[Any]:
        """A node's sizes as arguments: numbers, and nodes of symbolic ones."""
        return [
            size if isinstance(size, int) else self.emit(torch.ops.aten.sym_size.int, (node, dim))
            for dim, size in enumerate(node.meta["val"].shape)
        ]

    def _table_gradient(self, node: fx.Node) -> fx.Node:
        """The gradient of a table's part, where local gradients are put into rows of zeros."""
        marker = reduce_grad_of(node)
        weight = Placed(node, None, 0, frozenset([marker.name]))
        if self.dims[marker.name] != 0:
            reason = f"the gradient of {marker.name} is no product with tokens"
            raise Refused(reason, weight.names)
        return self._mean(self._put_total(marker.gradient, node, weight), node)

    def _element(self, node: fx.Node) -> Placed | PartialSum | fx.Node:
        """A tensor of several: of one placement, or bags. Nothing reads the others of bags."""
        source, index = arguments_of(node)
        if source.target is not BAGS:
            return element_of(self, node)
        if index == 0:
            found = self.placed[source]
            return PartialSum(found.node, tuple(self.own_sizes(node)), (), found.names)
        value = node.meta["val"]
        for like in source.all_input_nodes[1:]:
            sizes, is_alike = like.meta["val"].shape, like.meta["val"].dtype == value.dtype
            is_alike = is_alike and len(sizes) == value.dim()
            if is_alike and all(map(always_equal, sizes, value.shape)):
                return self.emit(_aten.mul.Tensor, (like, 0))
        if not _is_static(node):
            raise self.refused(node, f"{named(source)} has symbolic sizes (dynamic=True)")
        return self._zeros(list(value.shape), value)

    def _zeros(self, sizes: list[int], like: Tensor) -> fx.Node:
        """Zeros of these sizes, with the dtype and the device of a tensor."""
        kind = {"dtype": like.dtype, "layout": torch.strided, "device": like.device}
        return self.emit(_aten.full.default, (sizes, 0), {**kind, "pin_memory": False})

    def _put_total(self, put: fx.Node, node: fx.Node, weight: Placed) -> fx.Node:
        """This rank's rows of a table of zeros into which the local gradients of all are put."""
        if put.target in COPIES:
            source: Any = put.args[0]
            made = self._put_total(source, node, weight)
            return self.emit(put.target, (made, *put.args[1:]), put.kwargs)
        if put.target is PUT_IN_BAGS:
            found = put_in_bags(self, put, node, weight.names)
            if found is None:
                raise Refused("its bags are no sums or means", weight.names)
            return found
        adds = put.target is _MASKED or (len(put.args) > 3 and put.args[3] is True)
        if put.target not in _PUTS or not adds or put.meta["val"].dim() != 2:
            name = min(weight.names)
            raise Refused(f"the gradient of {name} is no product with tokens", weight.names)
        table, *masks, indices, values = arguments_of(put)[: 4 if put.target is _MASKED else 3]
        if table.target is not _aten.full.default or table.args[1] != 0 or len(indices) != 1:
            name = min(weight.names)
            raise Refused(f"the gradient of {name} is put into another table", weight.names)
        self._meta = put.meta
        for mask in masks:
            zero = self._zeros([], values.meta["val"])
            values = self.emit(_aten.where.self, (mask, values, zero))
        ids = self.all_tokens(self._flat(indices[0]), node, weight.names)
        sizes = [-1, *values.meta["val"].shape[indices[0].meta["val"].dim() :]]
        tokens = self.emit(_aten.reshape.default, (values, sizes))
        everything = self.all_tokens(tokens, node, weight.names)
        rows = put.meta["val"].shape[0] // self.ranks
        return self.emit(PUT_ROWS, (ids, everything, self.ctx.rank * rows, rows))

    def own_sizes(self, node: fx.Node) -> list[Any]:
        """A node's sizes as arguments of a reshape, with tokens outermost."""
        sizes = node.meta["val"].shape[1:]
        if not all(isinstance(size, int) for size in sizes):
            raise self.refused(node, f"{named(node)} has symbolic sizes (dynamic=True)")
        return [-1, *sizes]

    def _found(self, node: fx.Node, is_weight: bool) -> Placed | PartialSum | fx.Node:
        if is_weight:
            return self._weight(node)
        if any(one in self.placed and self.placed[one].is_share for one in node.all_input_nodes):
            return self._shared(node)
        if node.target is REDUCE_GRAD:
            is_placed = reduce_grad_of(node).gradient in self.placed
            return self._gradient(node) if is_placed else self._table_gradient(node)
        rule = _RULES.get(node.target)
        if rule is None and is_pointwise(node):
            rule = Mover._pointwise
        found = None if rule is None else rule(self, node)
        if found is None:
            raise self.refused(node, f"{named(node)} has no rule")
        return found

    def _shared(self, node: fx.Node) -> Placed | fx.Node:
        """A linear operator on shares and local gradients; a gradient's marker stays."""
        placed = {one: self.placed[one] for one in node.all_input_nodes if one in self.placed}
        if node.target is REDUCE_GRAD and reduce_grad_of(node).name not in self.dims:
            for one, found in placed.items():
                node.replace_input_with(one, found.node)
            return node
        is_linear = node.target in VIEWS or _is_linear(node, len(node.all_input_nodes))
        if not is_linear or not all(found.is_share for found in placed.values()):
            reason = f"{named(node)} changes a sum over the tokens and features of all ranks"
            raise self.refused(node, reason)
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda one: placed[one].node if one in placed else one
        )
        names = frozenset(name for found in placed.values() for name in found.names)
        return Placed(self.emit(node.target, args, kwargs), None, -1, names, is_share=True)

    def refused(self, node: fx.Node, reason: str, needs: Sequence[tuple[str, int]] = ()) -> Refused:
        own = [self.placed[one] for one in node.all_input_nodes if one in self.placed]
        return Refused(reason, frozenset().union(*(one.names for one in own)), needs)

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        if kwargs:
            node = self.graph.call_function(target, args, dict(kwargs))
            set_value(node)
        else:
            node = call(self.graph, target, args)
        node.meta.update((key, self._meta[key]) for key in _KEPT if key in self._meta)
        return node

    def _weight(self, node: fx.Node) -> Placed:
        """A weight: the own shard in the type in which it is read."""
        marker = unshard_of(node)
        shard = cast(self.graph, marker.shard, node.meta["val"].dtype)
        return Placed(shard, None, self.dims[marker.name], frozenset([marker.name]))

    def _gradient(self, node: fx.Node) -> fx.Node:
        """The gradient of a weight's shard: summed over all tokens, it needs the mean only."""
        marker = reduce_grad_of(node)
        found = self.placed.get(marker.gradient)
        dim = self.dims.get(marker.name)
        if found is None or not found.is_total or found.features != dim:
            raise self.refused(node, f"the gradient of {marker.name} is not the slice that stays")
        return self._mean(found.node, node)

    def _mean(self, total: fx.Node, node: fx.Node) -> fx.Node:
        """The mean over ranks of a total, in place of a reduction."""
        own = cast(self.graph, total, node.meta["val"].dtype)
        mean = self.emit(_aten.mul.Tensor, (own, 1.0 / self.ranks))
        if not mean.meta["val"].is_contiguous():
            mean = compact(self.graph, mean)
        GRADIENT_OF.set(mean, reduce_grad_of(node).name)
        self.gradients.append(mean)
        return mean

    def _product(self, node: fx.Node) -> Placed | PartialSum:
        """``mm`` and ``addmm``: see the cases below, with rows, columns and the inner dimension."""
        *bias, one, other = operands_of(node)
        left, right = self.placed.get(one), self.placed.get(other)
        if node.kwargs:
            raise self.refused(node, f"{named(node)} has factors")
        if left and right and (left.features, right.features) == (1, 0):
            if left.tokens == 0 and right.is_weight:
                if any(one in self.placed for one in bias):
                    raise self.refused(node, "the bias of the second product is sliced")
                part = self.emit(_aten.mm.default, (left.node, right.node))
                sizes = (-1, node.meta["val"].shape[1])
                return PartialSum(part, sizes, tuple(bias), right.names)
        elif right and left is None and right.is_weight and right.features == 1:
            return self._columns(node, one, right, bias)
        elif left and right is None and (left.tokens, left.features) == (1, 0) and not bias:
            tokens = self.all_tokens(other, node, left.names)
            made = self.emit(node.target, (left.node, tokens))
            return Placed(made, None, 0, left.names, is_total=True)
        elif right and left is None and (right.tokens, right.features) == (0, 1) and not bias:
            turned = self._all_tokens_turned(one, node, right)
            made = self.emit(node.target, (turned, right.node))
            return Placed(made, None, 1, right.names, is_total=True)
        raise self.refused(node, f"{named(node)} has no rule", self._missing(node))

    def _missing(self, node: fx.Node) -> list[tuple[str, int]]:
        """The weights that would have to stay for a product or a pointwise operator to be placed.

        A weight that is contracted; the weight of the other operand of a gate.
        """
        found = []
        placed = [one for one in node.all_input_nodes if one in self.placed]
        is_product = node.target in _PRODUCTS
        for one in operands_of(node)[-2:] if is_product else node.all_input_nodes:
            if one in self.placed:
                continue
            if is_product:
                dim = 0
            else:
                features = placed[0]
                own = self.placed[features].features
                dim = own - features.meta["val"].dim() + one.meta["val"].dim()
            found_at = origin(one, dim) if 0 <= dim < one.meta["val"].dim() else None
            if found_at is not None:
                found.append(found_at)
        return found

    def _columns(
        self, node: fx.Node, tokens: fx.Node, weight: Placed, bias: Sequence[fx.Node]
    ) -> Placed:
        """Tokens times the columns of a weight that this rank has."""
        names = weight.names
        own = []
        for one in bias:
            placed = self.placed.get(one)
            if placed is None or not placed.is_weight:
                found = origin(one, 0)
                raise self.refused(
                    node, "its bias does not stay with its weight", [found] if found else ()
                )
            own.append(placed.node)
            names |= placed.names
        everything = self.all_tokens(tokens, node, weight.names)
        made = self.emit(node.target, (*own, everything, weight.node))
        return Placed(made, 0, 1, names)

    def _added_up(self, found: PartialSum, node: fx.Node) -> fx.Node:
        """The own tokens of the sum of all ranks' parts, with the local tensors added."""
        total = self.combined(found.part, found.sizes, found.names, SUM_RANKS)
        self.totals.append(total)
        for one in found.others:
            total = self.emit(_aten.add.Tensor, (total, one))
        return total

    def combined(
        self, part: fx.Node, sizes: Sequence[Any], names: frozenset[str], combine: Any
    ) -> fx.Node:
        """The own tokens of all ranks' parts, which an operator of ``packing`` combines."""
        graph, ctx = self.graph, self.ctx
        target = REDUCE_SCATTER
        if ctx.uses_p2p:
            target = EXCHANGE
        elif combine is not SUM_RANKS or by_all_to_all(
            bytes_of(part.meta["val"]), ctx.group_name, ctx
        ):
            target = ALL_TO_ALL
        if target is ALL_TO_ALL and not _is_static(part):
            if combine is not SUM_RANKS:
                raise Refused(
                    "its largest features are of any number of tokens (dynamic=True)", names
                )
            target = REDUCE_SCATTER
        purpose = self._purpose(names, gathers=False)
        own = part if part.meta["val"].is_contiguous() else compact(graph, part)
        rows = reduce_rows(
            graph, target, flat(graph, own), self.ranks, ctx.group_name, purpose, combine
        )
        return after_wait(call(graph, _aten.view.default, (rows, list(sizes))))

    def all_tokens(self, tokens: fx.Node, node: fx.Node, names: frozenset[str]) -> fx.Node:
        """The tokens of all ranks along the first dimension. Gathered once.

        ``node``: the operator that reads them, for these weights.
        """
        found = self._gathered.get(tokens)
        if found is not None:
            return found
        if not all(isinstance(size, int) for size in tokens.meta["val"].shape[1:]):
            raise self.refused(node, "the size of a token is symbolic (dynamic=True)")
        if tokens in self.constants:
            times = [self.ranks, *[1] * (tokens.meta["val"].dim() - 1)]
            self._gathered[tokens] = self.emit(_aten.repeat.default, (tokens, times))
            return self._gathered[tokens]
        graph, ctx = self.graph, self.ctx
        own = tokens if tokens.meta["val"].is_contiguous() else compact(graph, tokens)
        purpose = self._purpose(names, gathers=True)
        wait, sent = gather(graph, [own], ctx.group_name, purpose, ctx)
        inner = list(own.meta["val"].shape[1:])
        if sent is None:
            everything = after_wait(call(graph, _aten.view.default, (wait, [-1, *inner])))
        else:
            everything = after_wait(call(graph, TOKENS_OF, (wait, inner, sent)))
        self._gathered[tokens] = everything
        return everything

    def _all_tokens_turned(self, turned: fx.Node, node: fx.Node, placed: Placed) -> fx.Node:
        """The tokens of all ranks along the second dimension of a matrix."""
        if turned.target is not _aten.permute.default or permuted_dims(turned) != [1, 0]:
            raise self.refused(node, f"{named(node)} reads tokens that are no transposed matrix")
        (source, *_) = turned.all_input_nodes
        everything = self.all_tokens(source, node, placed.names)
        return self.emit(_aten.permute.default, (everything, [1, 0]))

    def _purpose(self, names: frozenset[str], gathers: bool) -> Collective:
        """The purpose of a collective of tokens. A weight with several has numbers."""
        name = min(names)
        number = self._purposes.get((gathers, name), 0)
        self._purposes[gathers, name] = number + 1
        return Collective((slice_name(name, number),), gathers=gathers, tokens=True)

    def _sliced(self, node: fx.Node) -> Placed:
        """A slice along a dimension without tokens and features, or zeros around such a slice."""
        *sources, dim = arguments_of(node)[: 2 if node.target is _aten.slice.Tensor else 3]
        source = sources[-1]
        found, rank = self.placed.get(source), node.meta["val"].dim()
        zeros = sources[0] if len(sources) == 2 else None
        is_whole = zeros is None or (zeros.target is _aten.full.default and is_filled(zeros))
        if found is None or not is_whole or dim % rank in (found.tokens, found.features):
            raise self.refused(node, f"{named(node)} has no rule for this dimension")
        if zeros is None:
            return found.of(self.emit(node.target, (found.node, *node.args[1:])))
        size = node.meta["val"].shape[dim]
        places = dict(zip(("start", "end", "step"), arguments_of(node)[3:], strict=False))
        start, end, step = (places.get(one) for one in ("start", "end", "step"))
        start, end = start or 0, size if end is None else end
        if step not in (None, 1) or not all(isinstance(one, int) for one in (size, start, end)):
            raise self.refused(node, f"{named(node)} has no rule for these places")
        start, end = (one + size * (one < 0) for one in (start, end))
        pads = [0, 0] * (rank - 1 - dim % rank) + [start, max(0, size - end)]
        made = self.emit(_aten.constant_pad_nd.default, (found.node, pads, zeros.args[1]))
        return found.of(made)

    def _summed(self, node: fx.Node) -> Placed | PartialSum:
        """A sum over tokens is a total. One over features is a partial sum, over both a share."""
        source, dims, *rest = arguments_of(node)
        found = self.placed[source]
        rank = source.meta["val"].dim()
        over = {dim % rank for dim in dims}
        keeps = bool(rest and rest[0]) or bool(node.kwargs.get("keepdim"))
        tokens = None if found.tokens in over else found.tokens
        is_mean = node.target is _aten.mean.dim
        if (
            not over
            or found.is_weight
            or (found.tokens not in (None, 0) and found.features in over)
        ):
            raise self.refused(node, f"{named(node)} adds up the dimension that is sliced")
        if is_mean and over & {found.tokens, found.features}:
            raise self.refused(node, f"{named(node)} is over tokens or over the sliced dimension")
        made = self.emit(node.target, (found.node, *node.args[1:]), node.kwargs)
        if found.features in over and tokens is None:
            return Placed(made, None, -1, found.names, is_share=True)
        if found.features in over:
            return PartialSum(made, tuple(self.own_sizes(node)), (), found.names)

        def kept(dim: int) -> int:
            return dim if keeps else dim - sum(one < dim for one in over)

        return Placed(
            made,
            None if tokens is None else kept(tokens),
            kept(found.features),
            found.names,
            is_total=found.is_total or tokens != found.tokens,
        )

    def _spread(self, node: fx.Node, frame: Frame) -> dict[fx.Node, fx.Node]:
        """The local tensors that a pointwise operator reads, in the placement of its result.

        Raises:
            Refused: this rank cannot compute one.
        """
        found = {}
        for one in node.all_input_nodes:
            if one in self.placed:
                continue
            made = spread(self, one, frame)
            if made is None:
                reason = f"{named(node)} reads {named(one)}, which is for this rank's tokens"
                if _is_random(one):
                    reason = f"{named(node)} reads random numbers (dropout)"
                raise self.refused(node, reason, self._missing(node))
            found[one] = made
        return found

    def _pointwise(self, node: fx.Node) -> Placed:
        """Placed operands of one placement, weights of the same slice, and spread local tensors."""
        rank = node.meta["val"].dim()
        own = {one: self.placed[one] for one in node.all_input_nodes if one in self.placed}
        if any(placed.is_total for placed in own.values()):
            return self._pointwise_total(node, own)

        def aligned(one: fx.Node, dim: int | None) -> int | None:
            return None if dim is None else dim - one.meta["val"].dim() + rank

        features = {aligned(one, placed.features) for one, placed in own.items()}
        tokens = {aligned(one, placed.tokens) for one, placed in own.items()} - {None}
        if len(features) != 1 or len(tokens) > 1:
            raise self.refused(node, f"{named(node)} reads tensors of several placements")
        (feature,) = features
        token = next(iter(tokens), None)
        assert feature is not None
        for one, placed in own.items() if token is not None else ():
            assert token is not None
            allowed = (
                (None, 1) if placed.tokens is None else node.meta["val"].shape[token : token + 1]
            )
            if size_along(one, token, node) not in allowed:
                raise self.refused(node, f"{named(node)} reads a tensor along tokens")
        names = frozenset(name for placed in own.values() for name in placed.names)
        sizes = tuple(node.meta["val"].shape)
        others = self._spread(node, Frame(node, sizes, token, feature, names))
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs),
            lambda one: own[one].node if one in own else others[one],
        )
        return Placed(self.emit(node.target, args, kwargs), token, feature, names)

    def _pointwise_total(self, node: fx.Node, own: dict[fx.Node, Placed]) -> Placed:
        """A linear operator on totals; the gradient of a table's rows becomes one."""
        first = next(iter(own.values()))
        nodes = {one: placed.node for one, placed in own.items()}
        for one in node.all_input_nodes:
            if one not in own and first.features == 0 and node.target is _aten.add.Tensor:
                nodes[one] = self._put_total(one, node, first)
        is_one = {(one.is_total, one.features) for one in own.values()} == {(True, first.features)}
        if not is_one or not _is_linear(node, len(nodes)):
            raise self.refused(node, f"{named(node)} changes a sum over the tokens of all ranks")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
        names = frozenset(name for placed in own.values() for name in placed.names)
        made = self.emit(node.target, args, kwargs)
        return Placed(made, None, first.features, names, is_total=True)


#: By operator, the placement of its result; None: these arguments have no rule.
_RULES: dict[Any, Callable[[Mover, fx.Node], Placed | PartialSum | fx.Node | None]] = {
    **dict.fromkeys(_PRODUCTS, Mover._product),
    **dict.fromkeys(VIEWS, viewed),
    **dict.fromkeys(ATTENTIONS, attended),
    _aten.split.Tensor: split,
    operator.getitem: Mover._element,
    BAGS: bagged,
    _aten.embedding.default: Mover._embedded,
    _aten.permute.default: permuted,
    _aten.unsqueeze.default: unsqueezed,
    _aten.squeeze.dim: squeezed,
    _aten.expand.default: expanded,
    _aten.cat.default: joined,
    _aten.sum.dim_IntList: Mover._summed,
    _aten.mean.dim: Mover._summed,
    _aten.slice.Tensor: Mover._sliced,
    _aten.slice_scatter.default: Mover._sliced,
    _aten.amax.default: maximum,
    _aten.gather.default: looked_up,
}


def _is_static(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _kind(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return tuple(value.shape), value.dtype


def _is_linear(node: fx.Node, operands: int) -> bool:
    """Whether a pointwise operator is linear in its tensors, which are all ``operands``."""
    if len(node.all_input_nodes) != operands:
        return False
    if node.target in COPIES or node.target is _aten.neg.default:
        return True
    tensors = [one for one in node.args if isinstance(one, fx.Node)]
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor):
        return len(tensors) == 2
    if node.target is _aten.mul.Tensor:
        return len(tensors) == 1
    return node.target is _aten.div.Tensor and tensors == list(node.args[:1])


def _is_random(node: fx.Node) -> bool:
    """Whether a tensor comes from random numbers, by pointwise operators and changes of layout."""
    for _ in range(8):
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags or "random" in str(node.target):
            return True
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return False
