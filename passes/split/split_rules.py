"""Split rules: the slices of an operator with a sliced input.

``passes/split/split_operators.py`` applies the rules. A rule returns the operator's own slices; or
the sum over all slices, if the operator contracts the sliced dimension; or None: the operator then
reads its inputs whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.graph.fx_utils import always_equal, concrete, is_getitem
from passes.graph.op_traits import tags_of
from passes.ops.markers import UNSHARD, unshard_of
from passes.ops.slicing import TAKE_SLICE, Slices

if TYPE_CHECKING:
    from passes.split.split_operators import Splitter

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Sliced:
    """A tensor in slices along one dimension."""

    dim: int
    slices: Slices
    nodes: Sequence[fx.Node]


Found = Sliced | fx.Node | None
Rule = Callable[["Splitter", fx.Node], Found]


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an operator, typed ``Any``: its schema gives their types."""
    return node.args


def rule_of(node: fx.Node) -> Rule | None:
    """The rule for an operator, or None."""
    if node.op != "call_function" or is_getitem(node):
        return None
    if node.target in RULES:
        return RULES[node.target]
    tags = tags_of(node.target)
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return _pointwise
    return None


def wanted_of(node: fx.Node, dim: int, slices: Slices) -> dict[fx.Node, tuple[int, Slices]]:
    """The inputs to request in slices if a node is requested in slices.

    Returns the dimension and the slices by input. Only layout, pointwise and ``index_put``
    operators pass a request on.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return {}
    if node.target is _aten.permute.default:
        return {source: (permuted_dims(node)[dim], slices)}
    if node.target in _VIEWS:
        own = same_dim(node, source, dim)
        return {} if own is None else {source: (own, slices)}
    if node.target in _PUTS:
        table, _values = _table_and_values(node)
        return {table: (dim, slices)} if dim == len(_shape(node)) - 1 else {}
    if rule_of(node) is _pointwise:
        return {
            one: (dim - len(_shape(node)) + len(_shape(one)), slices)
            for one in node.all_input_nodes
            if size_along(one, dim, node) == slices.size
        }
    return {}


def along_weight(node: fx.Node, dim: int) -> tuple[str, int] | None:
    """The weight and its dimension that a tensor's dimension comes from; None if there is none.

    The search passes layout operators, and products with the weight as right operand.
    """
    while node.target is not UNSHARD:
        source: Any = node.args[0] if node.args else None
        if node.target in PRODUCTS:
            last = len(_shape(node)) - 1
            if dim != last and not (last == 2 and dim == 0):
                return None
            source = operands_of(node)[-1]
        elif node.target is _aten.permute.default:
            dim = permuted_dims(node)[dim]
        elif node.target in _VIEWS:
            own = same_dim(node, source, dim)
            if own is None:
                return None
            dim = own
        elif node.target not in LAID_OUT:
            return None
        node = source
    return unshard_of(node).name, dim


def read_along(marker: fx.Node) -> int | None:
    """The dimension of a weight that becomes a dimension of its operator's result; None: none does.

    ``marker``: the ``unshard`` of the weight.
    """
    read = [marker]
    for node in read:
        for user in node.users:
            if user.target is _aten.embedding.default and user.args[0] is node:
                return 1
            if user.target in PRODUCTS and operands_of(user)[-1] is node:
                last = len(_shape(user)) - 1
                found = along_weight(user, 0 if last == 2 else last)
                return None if found is None else found[1]
            if user.target in LAID_OUT:
                read.append(user)
    return None


def _shape(node: fx.Node) -> list[int]:
    value = node.meta.get("val")
    return concrete(value.shape) if isinstance(value, torch.Tensor) else []


def permuted_dims(node: fx.Node) -> list[int]:
    """The dimensions of a permutation's input, in the order of its result."""
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims]


def size_along(source: fx.Node, dim: int, node: fx.Node) -> int | None:
    """The size of a broadcast input along a dimension of the result; None: it lacks it."""
    shape = _shape(source)
    own = dim - len(_shape(node)) + len(shape)
    return shape[own] if own >= 0 else None


def _broadcast(
    splitter: Splitter, source: fx.Node, dim: int, slices: Slices, node: fx.Node
) -> list[fx.Node]:
    """For each slice of ``node``, its part of a broadcast input.

    Each slice reads the whole input if the input lacks the dimension or has size 1 there.
    """
    if size_along(source, dim, node) == slices.size:
        own = dim - len(_shape(node)) + len(_shape(source))
        return splitter.taken(source, own, slices)
    return [splitter.whole(source)] * slices.count


def same_dim(node: fx.Node, reshaped: fx.Node, dim: int) -> int | None:
    """The place of a dimension after a reshape that preserves it; None: it is not preserved.

    Symbolic sizes must be equal for all values, not only by their hints.
    """
    old, new = node.meta["val"].shape, reshaped.meta["val"].shape
    before = math.prod(old[:dim])
    for place, size in enumerate(new):
        if always_equal(size, old[dim]) and always_equal(math.prod(new[:place]), before):
            return place
    return None


def _pointwise(splitter: Splitter, node: fx.Node) -> Found:
    """Run once per slice. Inputs with the dimension are sliced; all slices read the others."""
    for source in node.all_input_nodes:
        one = splitter.sliced.get(source)
        if one is not None:
            dim = one.dim - len(_shape(source)) + len(_shape(node))
            return _each(splitter, node, dim, one.slices)
    return None


def _each(splitter: Splitter, node: fx.Node, dim: int, slices: Slices) -> Sliced:
    parts: dict[fx.Node, list[fx.Node]] = {}
    for source in node.all_input_nodes:
        parts[source] = _broadcast(splitter, source, dim, slices, node)
    nodes = []
    for index in range(slices.count):
        inputs = {source: found[index] for source, found in parts.items()}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        nodes.append(splitter.emit(index, node.target, args, kwargs))
    return Sliced(dim, slices, nodes)


def _on_each(splitter: Splitter, node: fx.Node, slices: Sequence[fx.Node]) -> list[fx.Node]:
    """The operator on every slice of its first argument."""
    return [
        splitter.emit(index, node.target, (one, *node.args[1:]), node.kwargs)
        for index, one in enumerate(slices)
    ]


def _on_each_of_size(
    splitter: Splitter, node: fx.Node, nodes: Sequence[fx.Node], dim: int, slices: Slices
) -> list[fx.Node]:
    """Like :func:`_on_each`, for an operator with the sizes of its result as argument."""
    sizes: Any = node.args[1]
    return [
        splitter.emit(
            index, node.target, (one, [*sizes[:dim], slices.part(index), *sizes[dim + 1 :]])
        )
        for index, one in enumerate(nodes)
    ]


def is_cheap(node: fx.Node) -> bool:
    """Whether :func:`made_in_slices` can compute a node."""
    return rule_of(node) is _pointwise or node.target in {_aten.expand.default, *_RESIZES}


def made_in_slices(splitter: Splitter, node: fx.Node, dim: int, slices: Slices) -> Found:
    """Compute a cheap node in slices although none of its inputs is sliced; None: not possible."""
    if rule_of(node) is _pointwise:
        return _each(splitter, node, dim, slices)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is _aten.expand.default:
        nodes = _broadcast(splitter, source, dim, slices, node)
        return Sliced(dim, slices, _on_each_of_size(splitter, node, nodes, dim, slices))
    if node.target in _RESIZES:
        before = same_dim(node, source, dim)
        if before is not None:
            taken = splitter.taken(source, before, slices)
            return Sliced(dim, slices, _on_each(splitter, node, taken))
    return None


def _permuted(splitter: Splitter, node: fx.Node) -> Found:
    source: Any = node.args[0]
    found = splitter.sliced.get(source)
    if found is None:
        return None
    nodes = _on_each(splitter, node, found.nodes)
    return Sliced(permuted_dims(node).index(found.dim), found.slices, nodes)


def _reshaped(splitter: Splitter, node: fx.Node) -> Found:
    """A reshape that preserves the sliced dimension. A view of a view is a view of the first."""
    source: Any = node.args[0]
    found = splitter.sliced.get(source)
    is_view = node.target in _VIEWS
    while is_view and found is None and source.target in _VIEWS:
        source = source.args[0]
        found = splitter.sliced.get(source) or splitter.unjoined.get(source)
    dim = None if found is None else same_dim(source, node, found.dim)
    if found is None or dim is None:
        return None
    if is_view:
        nodes = _on_each_of_size(splitter, node, found.nodes, dim, found.slices)
    else:
        nodes = _on_each(splitter, node, found.nodes)
    return Sliced(dim, found.slices, nodes)


def _expanded(splitter: Splitter, node: fx.Node) -> Found:
    source: Any = node.args[0]
    found = splitter.sliced.get(source)
    if found is None:
        return None
    dim = found.dim - len(_shape(source)) + len(_shape(node))
    nodes = _on_each_of_size(splitter, node, found.nodes, dim, found.slices)
    return Sliced(dim, found.slices, nodes)


def _reduced_elsewhere(splitter: Splitter, node: fx.Node) -> Found:
    """A reduction that is no sum of its slices: sliced only if it reduces other dimensions."""
    source: Any = node.args[0]
    found = splitter.sliced.get(source)
    dims: Any = node.args[1] if len(node.args) > 1 else ()
    if found is None or not dims or found.dim in {dim % len(_shape(source)) for dim in dims}:
        return None
    return _summed(splitter, node)


def _summed_up(splitter: Splitter, node: fx.Node) -> Found:
    """A sum over all elements: the sum of the slices' sums."""
    source: Any = node.args[0]
    found = splitter.sliced.get(source)
    if found is None:
        return None
    return _total(splitter, _on_each(splitter, node, found.nodes))


def _total(splitter: Splitter, parts: Sequence[fx.Node]) -> fx.Node:
    """The sum of the slices' results, one addition after the other."""
    total = parts[0]
    for index, one in enumerate(parts[1:], start=1):
        total = splitter.emit(index, _aten.add.Tensor, (total, one))
    return total


def _gathered_along(splitter: Splitter, node: fx.Node) -> Found:
    """``gather`` along another dimension: each slice with its own indices."""
    source, dim, places, *rest = arguments_of(node)
    found = splitter.sliced.get(source)
    if found is None or found.dim == dim % len(_shape(source)):
        return None
    if _shape(places)[found.dim] != found.slices.size:
        return None
    indices = splitter.taken(places, found.dim, found.slices)
    nodes = [
        splitter.emit(index, node.target, (one, dim, indices[index], *rest), node.kwargs)
        for index, one in enumerate(found.nodes)
    ]
    return Sliced(found.dim, found.slices, nodes)


def _summed(splitter: Splitter, node: fx.Node) -> Found:
    """A sum over other dimensions stays sliced. A sum over the sliced dimension adds the slices."""
    source: Any = node.args[0]
    dims: Any = node.args[1]
    keeps = len(node.args) > 2 and bool(node.args[2])
    found = splitter.sliced.get(source)
    if found is None or not dims:
        return None
    over = {dim % len(_shape(source)) for dim in dims}
    nodes = _on_each(splitter, node, found.nodes)
    if found.dim not in over:
        before = 0 if keeps else sum(dim < found.dim for dim in over)
        return Sliced(found.dim - before, found.slices, nodes)
    return _total(splitter, nodes)


def _product_of(splitter: Splitter, node: fx.Node) -> Found:
    """``mm``, ``addmm`` and ``bmm``: slices of rows, columns or the batch, or a sum of slices.

    If the plan slices the input rows of a weight, the slices begin here. They end at the product
    of their gradient with the weight.
    """
    *bias, one, other = operands_of(node)
    batched = node.target is _aten.bmm.default
    rows, inner, columns = (1, 2, 2) if batched else (0, 1, 1)
    left, right = splitter.sliced.get(one), splitter.sliced.get(other)
    if left is not None and left.dim == inner:
        return _added_up(splitter, node, left.slices, inner - 1)
    if right is not None and right.dim == inner - 1 and (left is None or left.dim != rows):
        return _added_up(splitter, node, right.slices, inner - 1)
    along = splitter.wanted.get(node)
    begun = left or right
    if along is None and begun is not None:
        along = begun.dim, begun.slices
    of_input = splitter.rows_of_input(node, other)
    if along is None and of_input is not None:
        along = rows, of_input
    if along is None:
        return None
    dim, slices = along
    count = slices.count
    lefts, rights = [splitter.whole(one)] * count, [splitter.whole(other)] * count
    if dim == rows or (batched and dim == 0):
        lefts = splitter.taken(one, dim, slices)
    if dim == columns or (batched and dim == 0):
        rights = splitter.taken(other, dim, slices)
    biases = [_broadcast(splitter, source, dim, slices, node) for source in bias]
    nodes = [
        splitter.emit(i, node.target, (*(b[i] for b in biases), lefts[i], rights[i]), node.kwargs)
        for i in range(count)
    ]
    found = Sliced(dim, slices, nodes)
    ends = of_input is not None and left is not None
    return splitter.join(found) if ends else found


def operands_of(node: fx.Node) -> list[fx.Node]:
    return [one for one in node.args if isinstance(one, fx.Node)]


def _added_up(splitter: Splitter, node: fx.Node, slices: Slices, row: int) -> Found:
    """A product that contracts the sliced dimension: each slice adds its product to the result.

    ``row``: the contracted dimension of the second operand.
    """
    *bias, one, other = operands_of(node)
    lefts = splitter.taken(one, row + 1, slices)
    rights = splitter.taken(other, row, slices)
    add = _aten.baddbmm.default if node.target is _aten.bmm.default else _aten.addmm.default
    scale = {key: value for key, value in node.kwargs.items() if key == "alpha"}
    total = [splitter.whole(source) for source in bias]
    for index, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        if index == 0:
            made = splitter.emit(index, node.target, (*total, left, right), node.kwargs)
        else:
            made = splitter.emit(index, add, (*total, left, right), scale)
        total = [made]
    return total[0]


def _slice_taken(splitter: Splitter, node: fx.Node) -> Found:
    """``take_slice`` of a tensor with the same slices: one of them."""
    source, dim, count, index, *cut = arguments_of(node)
    found = splitter.sliced.get(source)
    if found is None or (found.dim, found.slices) != (
        dim,
        Slices(_shape(source)[dim], count, *cut),
    ):
        return None
    taken: fx.Node = found.nodes[index]
    return taken


def _embedded(splitter: Splitter, node: fx.Node) -> Found:
    """An embedding: columns of the table are columns of the result."""
    table: Any = node.args[0]
    found = splitter.sliced.get(table)
    if found is None or found.dim != 1:
        return None
    nodes = _on_each(splitter, node, found.nodes)
    return Sliced(len(_shape(node)) - 1, found.slices, nodes)


def _filled(splitter: Splitter, node: fx.Node) -> Found:
    """A constant tensor, such as the start value of an embedding's gradient."""
    wanted = splitter.wanted.get(node)
    if wanted is None:
        return None
    dim, slices = wanted
    sizes: Any = node.args[0]
    nodes = []
    for index in range(slices.count):
        own = [*sizes[:dim], slices.part(index), *sizes[dim + 1 :]]
        nodes.append(splitter.emit(index, node.target, (own, *node.args[1:]), node.kwargs))
    return Sliced(dim, slices, nodes)


def _put(splitter: Splitter, node: fx.Node) -> Found:
    """``index_put``, as in an embedding's backward: sliced along the columns.

    The columns are the last dimension of the table and of the rows that are put in.
    """
    table, values = _table_and_values(node)
    wanted = splitter.wanted.get(node)
    found = splitter.sliced.get(table)
    if wanted is None or found is None or wanted[0] != len(_shape(node)) - 1:
        return None
    _, slices = wanted
    rows = splitter.taken(values, len(_shape(values)) - 1, slices)
    others = [one for one in node.all_input_nodes if one not in (table, values)]
    nodes = []
    for index in range(slices.count):
        parts = {table: found.nodes[index], values: rows[index]}
        parts.update((one, splitter.whole(one)) for one in others)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), parts.__getitem__)
        nodes.append(splitter.emit(index, node.target, args, kwargs))
    return Sliced(wanted[0], slices, nodes)


def _table_and_values(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    masked = node.target is not _aten.index_put.default
    table, values = node.args[0], node.args[3 if masked else 2]
    assert isinstance(table, fx.Node) and isinstance(values, fx.Node)
    return table, values


#: Products of two operands, with an optional bias as first argument.
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_PUTS = {_aten.index_put.default, _aten._unsafe_masked_index_put_accumulate.default}
_RESIZES = {_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}

#: Operators that only change the layout or dtype of a weight for a product.
LAID_OUT = _VIEWS | {
    _aten.permute.default,
    torch.ops.prims.convert_element_type.default,
}

RULES: dict[Any, Rule] = {
    _aten.permute.default: _permuted,
    _aten.expand.default: _expanded,
    _aten.gather.default: _gathered_along,
    _aten.sum.dim_IntList: _summed,
    _aten.sum.default: _summed_up,
    _aten.amax.default: _reduced_elsewhere,
    _aten.amin.default: _reduced_elsewhere,
    **dict.fromkeys(_RESIZES, _reshaped),
    **dict.fromkeys(PRODUCTS, _product_of),
    _aten.embedding.default: _embedded,
    TAKE_SLICE: _slice_taken,
    _aten.full.default: _filled,
    **dict.fromkeys(_PUTS, _put),
    torch.ops.prims.convert_element_type.default: _pointwise,
    _aten.clone.default: _pointwise,
    **dict.fromkeys(_VIEWS, _reshaped),
}
