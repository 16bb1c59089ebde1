"""Which nodes Inductor will run as one kernel, and which tensors it will really allocate.

Inductor fuses runs of pointwise operators and reductions; what only lives inside such a
run never touches memory. A matrix product, a convolution, attention or a collective is a
*barrier*: a kernel of its own, whose inputs must exist.

The model: a fusible node's *depth* is the number of barriers before it on the longest
path, raised to that of its consumers where it feeds nothing shallower (Inductor computes
such a chain inside its consumer). Connected fusible nodes of one depth are one *region*:
no path between two of them can leave the region and come back, for that would cross a
barrier and raise the depth.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch import fx

from passes.graph import COLLECTIVES, by_target, is_alias, is_getitem, output_nodes, root_of
from passes.markers import REDUCE_GRAD, UNSHARD
from passes.packing import PACKING

_aten = torch.ops.aten
#: Reductions that lack the tag.
REDUCTIONS = {
    _aten.sum.dim_IntList,
    _aten.sum.default,
    _aten.mean.dim,
    _aten.mean.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.var_mean.correction,
    _aten.var.correction,
    _aten.prod.default,
    _aten.any.default,
    _aten.any.dim,
    _aten.all.default,
    _aten.argmax.default,
}
# Pointwise and reductions by tag are fusible; these lack the tag, and Inductor fuses them too.
_ALSO_FUSIBLE = REDUCTIONS | {
    _aten.cat.default,
    _aten.full.default,
    _aten.full_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.empty_like.default,
    _aten.scalar_tensor.default,
    _aten.argmin.default,
    _aten.embedding.default,
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.constant_pad_nd.default,
    _aten.clone.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
    _aten.copy.default,
    _aten.arange.start_step,
    torch.ops.prims.iota.default,
    torch.ops.prims.convert_element_type.default,
    _aten.native_dropout.default,
}


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor may run this node inside a fused kernel."""
    if node.op != "call_function":
        return False
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_fusible(source)
    return _fuses(node.target)


@by_target
def _fuses(target: Any) -> bool:
    if target in COLLECTIVES or target in (UNSHARD, REDUCE_GRAD) or target in PACKING:
        return False
    if target in _ALSO_FUSIBLE or str(target).startswith("prims.inductor_"):
        return True
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def is_reduction(node: fx.Node) -> bool:
    """Whether a node makes few elements of many."""
    return node.op == "call_function" and _reduces(node.target)


@by_target
def _reduces(target: Any) -> bool:
    return target in REDUCTIONS or torch.Tag.reduction in getattr(target, "tags", ())


def effective_users(node: fx.Node) -> list[fx.Node]:
    """Who reads a node's memory: its users, with views and waits looked through."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_alias(user):
                stack.append(user)
            else:
                found[user] = None
    return list(found)


def _writer_of(node: fx.Node) -> fx.Node:
    """The node that last wrote what this one shows: an all-reduce, though in place, is one."""
    while is_alias(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _depths(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        own = 0
        for source in node.all_input_nodes:
            root = _writer_of(source)
            own = max(
                own, depth.get(root, 0) + (root.op == "call_function" and not is_fusible(root))
            )
        depth[node] = own
    for node in reversed(nodes):  # sink a chain into the consumers that will inline it
        if is_fusible(node):
            users = effective_users(node)
            if users and all(is_fusible(user) for user in users):
                depth[node] = max(depth[node], min(depth[user] for user in users))
    return depth


def regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """The region of every fusible node: equal numbers are one kernel.

    Numbers follow the order of the graph, so they are the same on every rank.
    """
    nodes = [node for node in graph.nodes if node.op != "output" and not is_alias(node)]
    depth = _depths(nodes)
    linked: nx.Graph = nx.Graph()
    for node in nodes:
        if not is_fusible(node):
            continue
        linked.add_node(node)
        for source in node.all_input_nodes:
            root = _writer_of(source)
            if is_fusible(root) and depth[root] == depth[node]:
                linked.add_edge(root, node)
    region: dict[fx.Node, int] = {}
    count = 0
    for node in nodes:
        if node in linked and node not in region:
            for member in nx.node_connected_component(linked, node):
                region[member] = count
            count += 1
    return region


def materialized(graph: fx.Graph, region: dict[fx.Node, int]) -> set[fx.Node]:
    """The nodes whose output is a buffer in memory, views left out.

    Everything that no kernel fuses, and of a region what someone outside it reads.
    """
    returned = {root_of(node) for node in output_nodes(graph)}
    real: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output" or is_alias(node):
            continue
        if (
            node not in region
            or node in returned
            or any(region.get(user) != region[node] for user in effective_users(node))
        ):
            real.add(node)
    return real
