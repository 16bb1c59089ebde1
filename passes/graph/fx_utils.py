"""FX helpers for all passes: new nodes with metadata, sizes, aliases, copies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from passes._torch import FakeTensorMode, OpOverload, called, copied_graph
from passes.ops.markers import LEFT_OUT, REDUCE_GRAD, UNSHARD
from passes.ops.model_collectives import kind_of
from passes.ops.p2p import EXCHANGE, GATHER_PARTS
from passes.ops.packing import PACKING

_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_TO_ALL = _c10d.all_to_all_single.default
WAIT = _c10d.wait_tensor.default

#: Collectives that passes emit, with their names in the hardware profile.
COLLECTIVES: dict[Any, str] = {
    ALL_GATHER: "all_gather",
    ALL_REDUCE: "all_reduce",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_TO_ALL: "all_to_all",
    GATHER_PARTS: "all_gather",
    EXCHANGE: "all_to_all",
}

_aten = torch.ops.aten
#: The cast that passes emit; ``_CASTS``: all casts in graphs.
CAST = torch.ops.prims.convert_element_type.default
_CASTS = {CAST, _aten._to_copy.default}
#: Operators that give a tensor other sizes, with its elements in their order.
RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
# Not views by their schema, but Inductor does not copy for them.
_FREE = {_aten._unsafe_view.default, _aten.reshape.default, _aten.detach.default}


_T = TypeVar("_T")


def by_target(ask: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Cache a function of an operator.

    The key is the operator's identity: the hash of torch's operators is slow Python code.
    """
    known: dict[int, tuple[Any, _T]] = {}  # holds the operator, so that its id stays valid

    def remembered(target: Any) -> _T:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = target, ask(target)
        return found[1]

    return remembered


@by_target
def _views(target: Any) -> bool:
    return target in _FREE or bool(getattr(target, "is_view", False))


@by_target
def aliases(target: Any) -> bool:
    """Whether an operator returns a view, or is a wait."""
    return target is WAIT or _views(target)


@by_target
def _communicates(target: Any) -> bool:
    return target in COLLECTIVES


def is_view(node: fx.Node) -> bool:
    """Whether a node's output is a view of its first argument."""
    return node.op == "call_function" and _views(node.target)


def is_cast(node: fx.Node) -> bool:
    """Whether a node casts its first argument to another dtype (or device)."""
    return node.op == "call_function" and node.target in _CASTS


def is_alias(node: fx.Node) -> bool:
    """Whether a node is a view, or a wait: a wait returns the collective's own output.

    An item of an operator that returns several views (``split``) is a view.
    """
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_alias(source)
    return node.op == "call_function" and aliases(node.target)


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    return node.op == "call_function" and _communicates(node.target)


@by_target
def _communicates_for_model(target: Any) -> bool:
    return kind_of(target) is not None


def is_model_collective(node: fx.Node) -> bool:
    """Whether a node is a collective of the model itself, with its wait."""
    return node.op == "call_function" and _communicates_for_model(node.target)


def group_of(node: fx.Node) -> str:
    """The name of a collective's process group, ours or the model's: its last argument."""
    return str(node.args[-1])


def is_marker(node: fx.Node) -> bool:
    """Whether a node is a marker, or stands for the left-out layers of a folded step."""
    return node.op == "call_function" and node.target in (UNSHARD, REDUCE_GRAD, LEFT_OUT)


def is_packing(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in PACKING


def root_of(node: fx.Node) -> fx.Node:
    """The node that owns this node's memory, through views, waits and in-place all-reduces.

    Inductor runs an all-reduce in place on its input; the passes always create this input.
    """
    while (is_alias(node) or node.target is ALL_REDUCE) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def hint(size: Any) -> int:
    """A size as a number; of a symbolic size the hint.

    Raises:
        ValueError: for a symbolic size without a hint.
    """
    if isinstance(size, int):
        return size
    value = size.node.hint
    if value is None:
        raise ValueError(f"the symbolic size {size} has no hint: compile with dynamic=False")
    return int(value)


def concrete(sizes: Iterable[Any]) -> list[int]:
    """Sizes or strides as numbers (:func:`hint`)."""
    return [hint(size) for size in sizes]


def always_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal for all values of their symbols."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return bool(statically_known_true(one == other))


def numel_of(value: Any) -> int:
    """Number of elements of a fake tensor (:func:`hint`)."""
    count = 1
    for size in value.shape:
        count *= hint(size)
    return count


def bytes_of(value: Any) -> int:
    """Bytes of a fake tensor or of a tuple of them; 0 for anything else."""
    known = _shared.get()
    if known is not None:
        found = known.get(id(value))
        if found is None:  # holds the value, so that its id stays valid
            found = known[id(value)] = value, _bytes_of(value)
        return found[1]
    return _bytes_of(value)


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return numel_of(value) * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes_of(item) for item in value)
    return 0


def tensor_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Input nodes that hold tensors, in argument order, each once."""
    for source in node.all_input_nodes:
        if isinstance(source.meta.get("val"), torch.Tensor | list | tuple):
            yield source


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that returns the graph's outputs."""
    output: fx.Node = next(iter(reversed(graph.nodes)))
    return output


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the graph returns, without None, each once."""
    return list(output_node(graph).all_input_nodes)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The FakeTensorMode of the graph's values.

    Raises:
        ValueError: if no node carries a fake tensor (the graph was not traced).
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        mode: FakeTensorMode | None = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    raise ValueError("no node of this graph carries a fake tensor in meta['val']")


def call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    name: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A new node at the graph's insert point, with ``meta["val"]`` computed from its inputs."""
    if kwargs or _shared.get() is None:
        node = graph.create_node("call_function", target, args, dict(kwargs or {}), name)
    else:
        node = called(graph, target, args, name)
    set_value(node)
    return node


def set_value(node: fx.Node) -> None:
    """Compute ``meta["val"]`` of a node from those of its inputs."""

    def computed() -> Any:
        args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
        kwargs = fx.node.map_arg(node.kwargs, lambda source: source.meta["val"])
        with fake_mode_of(node.graph), torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    key = None if _shared.get() is None else value_key(node)
    node.meta["val"] = once(key, computed)


def empty_value(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A fake tensor of another shape, shared within :func:`shared_values`."""

    def computed() -> torch.Tensor:
        with torch.no_grad():
            return like.new_empty(list(shape))

    made: torch.Tensor = once(("empty", tuple(shape), like.dtype, like.device), computed)
    return made


def once(key: Hashable | None, compute: Callable[[], Any]) -> Any:
    """A value, cached by key within :func:`shared_values`; key None: never cached."""
    known = _shared.get()
    if known is None or key is None:
        return compute()
    if key not in known:
        known[key] = compute()
    return known[key]


def once_for(what: str, node: fx.Node, compute: Callable[[fx.Node], _T]) -> _T:
    """A function of a node's operator, input values and output value.

    The result is cached within :func:`shared_values`. The key has no other arguments of the
    operator: nodes with other arguments never share their output value. ``what`` names the
    function.
    """
    known = _shared.get()
    if known is None:
        return compute(node)
    values = [one.meta.get("val") for one in (*node.all_input_nodes, node)]
    key = what, id(node.target), *map(id, values)
    found = known.get(key)
    if found is None:  # holds the values, so that their ids stay valid
        found = known[key] = values, compute(node)
    return found[1]


#: The cache of :func:`shared_values`; None: every node gets its own value.
_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("_shared", default=None)


@contextmanager
def shared_values(known: dict[Hashable, Any]) -> Iterator[None]:
    """Share fake values among nodes with the same operator and the same input shapes.

    For graphs that are analysed and never compiled: the planner lowers many graphs, and fake
    tensors take most of this time. Within it, values do not show which nodes share memory.

    It is a cache and changes no other result (``tests/passes/pricing/test_predict.py``). So no
    argument carries it through all functions that make nodes or count bytes, a user's passes among
    them.

    ``known``: the cache; the caller owns it.
    """
    token = _shared.set(known)
    try:
        yield
    finally:
        _shared.reset(token)


def value_key(node: fx.Node) -> Hashable | None:
    """A cache key of a value: operator, arguments, tensors by shape, strides, dtype and device.

    None if an argument is not hashable.
    """

    kwargs = node.kwargs and tuple((k, _described(v)) for k, v in node.kwargs.items())
    key = id(node.target), tuple(map(_described, node.args)), kwargs
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _described(argument: Any) -> Hashable:
    if isinstance(argument, fx.Node):
        value = argument.meta["val"]
        known = _shared.get()
        if known is None:
            return _described(value)
        found = known.get(("kind", id(value)))
        if found is None:  # holds the value, so that its id stays valid
            found = known["kind", id(value)] = value, _described(value)
        return found[1]
    if isinstance(argument, torch.Tensor):
        shape, strides = _sizes(argument.shape), _sizes(argument.stride())
        return shape, strides, argument.dtype, argument.device
    if isinstance(argument, torch.SymInt):
        return argument.node.expr, argument.node.shape_env
    if isinstance(argument, list | tuple):
        return type(argument).__name__, *map(_described, argument)
    return type(argument), argument


def _sizes(sizes: Sequence[int | torch.SymInt]) -> tuple[Hashable, ...]:
    return tuple(one if isinstance(one, int) else _described(one) for one in sizes)


def compact(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A contiguous copy of a node's tensor, at the graph's insert point."""
    copied = graph.call_function(
        _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
    )
    set_value(copied)
    return copied


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


class _Uncompiled(fx.GraphModule):
    """A module for analysis only: its code is generated on access, not on ``recompile``."""

    def recompile(self) -> Any:
        return None

    @property
    def code(self) -> str:
        return self.graph.python_code("self").src


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy for graph rewrites; it cannot run.

    Fake tensors and constants are shared with the original.
    """
    return module_of(gm, copied_graph(gm.graph))


def module_of(owner: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module for analysis of a graph, with the attributes that the graph needs from ``owner``."""
    return _Uncompiled(owner, graph)


def remove_dead(graph: fx.Graph) -> None:
    """Erase unused pure nodes; faster than torch's ``eliminate_dead_code``."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Each node's index in the order of execution."""
    return {node: index for index, node in enumerate(graph.nodes)}


def last_of(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    return max(nodes, key=order.__getitem__)


def gives_nothing(node: fx.Node) -> bool:
    """Whether an operator returns no value, as linalg's error check; it has no ``meta["val"]``."""
    target = node.target
    return isinstance(target, OpOverload) and not target._schema.returns
