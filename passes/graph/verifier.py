"""Verifier: the invariants of a graph after every pass.

- The graph is well formed and in topological order (``graph.lint``).
- ``meta["val"]`` equals the result of the operator on its inputs' values (dtype, shape, strides;
  tensors of deterministic operators only).
- The inputs of collectives are contiguous.
- Every collective has exactly one user, its wait.
- The input of a P2P collective is an input of the graph or has a reader after the wait.
- Of a step: each input of the backward names a tensor that the forward saves, and each of these
  has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from passes._torch import FakeTensorMode, OpOverload
from passes.graph.fx_utils import (
    ALL_REDUCE,
    COLLECTIVES,
    WAIT,
    fake_mode_of,
    gives_nothing,
    output_node,
    positions,
    root_of,
    value_key,
)
from passes.graph.op_traits import effective_users
from passes.graph.step_module import graphs_of, saved_inputs, saved_name
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.ops.p2p import EXCHANGE, GATHER_PARTS

#: Dtype, shape and strides.
_Result = tuple[torch.dtype, tuple[Any, ...], tuple[Any, ...]]
#: Of a trace, the results of operators by what their arguments are.
_results: WeakKeyDictionary[FakeTensorMode, dict[Hashable, _Result]] = WeakKeyDictionary()


class InvalidGraph(AssertionError):
    """A pass left an invalid graph; the message names the pass and, if known, the node."""


def check(gm: fx.GraphModule, pass_name: str) -> None:
    """Raise ``InvalidGraph`` if an invariant does not hold. See the module's docstring."""
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


def check_step(step: fx.GraphModule, pass_name: str) -> None:
    """Raise ``InvalidGraph`` if a backward does not get what its forward saves."""
    forward, backward = graphs_of(step)
    inputs = saved_inputs(backward.graph)
    returned: Any = output_node(forward.graph).args[0]
    saved = Counter(node.name for node in returned[len(returned) - len(inputs) :])
    named = Counter(map(saved_name, inputs))
    if saved != named:
        raise InvalidGraph(
            f"after pass {pass_name!r}: the forward saves {sorted(saved - named)}, which no input "
            f"of the backward names; its inputs name {sorted(named - saved)}, which is not saved"
        )


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
    """A sent tensor needs a reader after the wait; otherwise Inductor may reuse its memory."""
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
            f"{wait}: an operator after the wait must take it as 'sent' (see passes/ops/p2p.py)"
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
    if not isinstance(node.target, OpOverload):
        return
    tags = node.target.tags
    if torch.Tag.nondeterministic_seeded in tags or torch.Tag.data_dependent_output in tags:
        return
    dtype, shape, strides = _result_of(node)
    for what, a, b in (
        ("dtype", said.dtype, dtype),
        ("shape", tuple(said.shape), shape),
        ("strides", said.stride(), strides),
    ):
        if a != b and not (what == "strides" and said.numel() <= 1):
            raise InvalidGraph(
                f"after pass {pass_name!r}: node {node} ({node.target}) says {what} {a} in "
                f"meta['val'], running it gives {b}"
            )


def _result_of(node: fx.Node) -> _Result:
    """Dtype, shape and strides of a node's result, computed once for equal arguments."""
    mode, key = fake_mode_of(node.graph), value_key(node)
    known = _results.setdefault(mode, {})
    if key is not None and key in known:
        return known[key]
    args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    kwargs = fx.node.map_arg(node.kwargs, lambda source: source.meta["val"])
    with mode, torch.no_grad():
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    found = value.dtype, tuple(value.shape), value.stride()
    if key is not None:
        known[key] = found
    return found
