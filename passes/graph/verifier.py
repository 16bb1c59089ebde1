"""Check: what must hold after every pass.

- the graph is well formed and in topological order (``graph.lint``);
- ``meta["val"]`` is what running the node on its inputs' values gives (dtype, shape, strides);
- the inputs of collectives are contiguous;
- every started collective is waited for, once, and nothing but the wait reads its output
  before (its input lives until the wait because the wait is what ends its use).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from passes.graph.fx_utils import (
    ALL_REDUCE,
    COLLECTIVES,
    WAIT,
    fake_mode_of,
    gives_nothing,
    positions,
    root_of,
)
from passes.graph.op_traits import effective_users
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.ops.p2p import EXCHANGE, GATHER_PARTS

#: What nodes were when their values were found right: a pass leaves most of them as they are.
#: (Arguments as text: a node that is held from here would hold all of its graph.)
_right: WeakKeyDictionary[fx.Node, tuple[Any, str, list[Any]]] = WeakKeyDictionary()


class InvalidGraph(AssertionError):
    """A pass left a graph that does not hold together; names the pass and the node."""


def check(gm: fx.GraphModule, pass_name: str) -> None:
    """Raise :class:`InvalidGraph` if the graph broke a rule. See the module's docstring."""
    try:
        gm.graph.lint()
    except (RuntimeError, ValueError) as error:
        raise InvalidGraph(f"after pass {pass_name!r}: {error}") from error
    order = positions(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in COLLECTIVES:
            _check_collective(node, pass_name)
        if node.target in (GATHER_PARTS, EXCHANGE):
            _check_alive(node, order, pass_name)
        _check_value(node, pass_name)


def _check_collective(node: fx.Node, pass_name: str) -> None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or not source.meta["val"].is_contiguous():
        raise InvalidGraph(
            f"after pass {pass_name!r}: the input {source} of collective {node} is not contiguous"
        )
    users = list(node.users)
    if len(users) != 1 or users[0].target is not WAIT:
        raise InvalidGraph(
            f"after pass {pass_name!r}: collective {node} must be used by one wait, not {users}"
        )


def _check_alive(start: fx.Node, order: dict[fx.Node, int], pass_name: str) -> None:
    """What is being sent must have a reader after the wait, or Inductor may write over it."""
    source = root_of(start.all_input_nodes[0])
    (wait,) = start.users
    if source.op == "placeholder":
        return
    readers = effective_users(source)
    in_place = [reader for reader in readers if reader.target is ALL_REDUCE]
    readers += [reader for node in in_place for reader in effective_users(node)]
    if not any(order[reader] > order[wait] for reader in readers):
        raise InvalidGraph(
            f"after pass {pass_name!r}: the input {source} of {start} may be written to before "
            f"{wait}: whatever follows the wait must take it as 'sent' (see passes/ops/p2p.py)"
        )


def _check_value(node: fx.Node, pass_name: str) -> None:
    if "val" not in node.meta:
        if gives_nothing(node):
            return
        raise InvalidGraph(
            f"after pass {pass_name!r}: node {node} ({node.target}) has no meta['val']"
        )
    said = node.meta["val"]
    if not isinstance(said, torch.Tensor) or node.target in (UNSHARD, REDUCE_GRAD):
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    tags = node.target.tags
    if torch.Tag.nondeterministic_seeded in tags or torch.Tag.data_dependent_output in tags:
        return
    values = [said, *(source.meta["val"] for source in node.all_input_nodes)]
    text = repr((node.args, node.kwargs))
    if _is_as(_right.get(node), node.target, text, values):
        return
    args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    kwargs = fx.node.map_arg(node.kwargs, lambda source: source.meta["val"])
    with fake_mode_of(node.graph), torch.no_grad():
        found = node.target(*args, **kwargs)
    for what, a, b in (
        ("dtype", said.dtype, found.dtype),
        ("shape", tuple(said.shape), tuple(found.shape)),
        ("strides", said.stride(), found.stride()),
    ):
        if a != b and not (what == "strides" and said.numel() <= 1):
            raise InvalidGraph(
                f"after pass {pass_name!r}: node {node} ({node.target}) says {what} {a} in "
                f"meta['val'], running it gives {b}"
            )
    _right[node] = (node.target, text, values)


def _is_as(
    seen: tuple[Any, str, list[Any]] | None, target: Any, text: str, values: list[Any]
) -> bool:
    """Whether a node is what it was, with the very same values of it and of its inputs."""
    return (
        seen is not None
        and seen[0] is target
        and seen[1] == text
        and len(seen[2]) == len(values)
        and all(one is other for one, other in zip(seen[2], values, strict=True))
    )
