"""Private torch: every private name that the passes use, with the torch versions checked.

No other file in ``passes/`` imports from ``torch._*``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

# 2.11.0 to 2.15.0: an assertion on values, checked where the kernel runs.
from torch import _assert_async as assert_async
from torch import fx

# 2.11.0 to 2.15.0: the origin of a joint graph's output that writes into an input
# (node.meta["desc"]).
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

# 2.11.0 to 2.15.0: thresholds of `StorageBox.should_realize_on_reuse`.
from torch._inductor import config as _inductor_settings

# 2.11.0 to 2.15.0: an operator for given types of arguments, and one for all types.
from torch._ops import OpOverload, OpOverloadPacket

# 2.11.0 to 2.15.0: the partitioner's wrappers that run a random operator twice with the
# same generator state.
from torch._prims.rng_prims import (
    graphsafe_run_with_rng_state,
    run_and_save_rng_state,
    run_with_rng_state,
)

# 2.11.0 to 2.15.0: FakeTensorMode of a graph's values; computes `meta["val"]` of new nodes.
from torch._subclasses.fake_tensor import FakeTensorMode

# 2.11.0 to 2.15.0: the policy tags that the partitioner obeys (node.meta["recompute"]).
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "GRAPHSAFE_RUN_WITH_RNG_STATE",
    "RUN_AND_SAVE_RNG_STATE",
    "RUN_WITH_RNG_STATE",
    "CheckpointPolicy",
    "FakeTensorMode",
    "InputMutationAOTOutput",
    "OpOverload",
    "OpOverloadPacket",
    "RealizeThresholds",
    "assert_async",
    "called",
    "copied_graph",
    "realize_thresholds",
]


class RealizeThresholds(NamedTuple):
    """Inductor realizes a pointwise result above one of these counts.

    ``reads``: buffers that a result with several users reads; ``accumulated_reads``: the same of
    any result. ``operators``: operators that compute a result, loads included.
    ``broadcast_is_use``: whether ``reads`` also holds for a result with one user that is larger.
    """

    reads: int
    accumulated_reads: int
    operators: int
    broadcast_is_use: bool


RUN_AND_SAVE_RNG_STATE = run_and_save_rng_state
RUN_WITH_RNG_STATE = run_with_rng_state
GRAPHSAFE_RUN_WITH_RNG_STATE = graphsafe_run_with_rng_state


def copied_graph(source: fx.Graph) -> fx.Graph:
    """Copy a graph like ``Graph.graph_copy``, but without its slow checks per node.

    Node names are kept. Private attributes of ``fx.Graph`` and ``fx.Node``: torch 2.13.0.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy_of = copies.__getitem__
    names: dict[object, str] = {}
    insert = graph._insert
    for node in source.nodes:
        args = fx.node.map_arg(node.args, copy_of)
        kwargs = fx.node.map_arg(node.kwargs, copy_of)
        copied = fx.Node(graph, node.name, node.op, node.target, args, kwargs, node.type)
        copied.meta.update(node.meta)  # assigning ``meta`` would look up tables by slow hashes
        insert(copied)
        copies[node] = copied
        names[copied] = node.name
    graph._len = len(copies)
    namespace, known = graph._graph_namespace, source._graph_namespace
    namespace._obj_to_name = names
    namespace._used_names = set(known._used_names)
    namespace._base_count = dict(known._base_count)
    by_target = graph._find_nodes_lookup_table.table
    for key, nodes in source._find_nodes_lookup_table.table.items():
        by_target[key] = {copies[node]: None for node in nodes}
    return graph


def called(
    graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], name: str | None
) -> fx.Node:
    """Create a node at the insert point like ``Graph.create_node``, but without symbol lookup.

    Private attributes of ``fx.Graph`` and ``fx.Node``: torch 2.13.0.
    """
    namespace = graph._graph_namespace
    name = namespace.create_name(name or graph._target_to_str(target), None)
    node = fx.Node(graph, name, "call_function", target, args, {})
    namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def realize_thresholds(on_cpu: bool) -> RealizeThresholds:
    """The thresholds of Inductor's settings."""
    settings = _inductor_settings
    reads, operators = settings.realize_acc_reads_threshold, settings.realize_opcount_threshold
    if reads is None and on_cpu:
        reads = settings.realize_cpu_acc_reads_threshold
    elif reads is None:
        reads = settings._realize_acc_reads_threshold_default
    if operators is None and on_cpu:
        operators = settings.realize_cpu_opcount_threshold
    elif operators is None:
        operators = settings._realize_opcount_threshold_default
    return RealizeThresholds(
        settings.realize_reads_threshold, reads, operators, _broadcast_is_use()
    )


@functools.cache
def _broadcast_is_use() -> bool:
    # 2.11.0 to 2.15.0: imported here, because it takes a second. 2.13.0 and later tell the two
    # apart by this argument.
    from torch._inductor.ir import StorageBox

    return "graph_reuse" not in inspect.signature(StorageBox.should_realize_on_reuse).parameters
