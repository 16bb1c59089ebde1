"""Dedupe: one unshard and one gradient reduction for each parameter.

Needs: a graph with markers. Leaves: one ``unshard`` per parameter, at its first use, and one
``reduce_grad``, of the sum of the gradients.

Weights with several uses, repeated module calls and tied weights read one parameter several
times. Each read is a marker, and each marker's derivative is a ``reduce_grad``.

Before::                              After::

    w1 = unshard(p)                       w = unshard(p)
    w2 = unshard(p)
    return add(reduce(g1), reduce(g2))    return reduce(add(g1, g2))

The reduction is linear, so the sum may come first.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.fx_utils import output_nodes, set_value
from passes.ops.markers import REDUCE_GRAD, reduce_grad_of, set_args, unshard_of, unshards
from passes.types.context import Context

_ADD = torch.ops.aten.add.Tensor


def dedupe(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Merge the markers of each parameter. See the module's docstring."""
    _merge_unshards(gm.graph)
    for node in output_nodes(gm.graph):
        if node.target is _ADD:
            _merge_reductions(node)
    gm.graph.eliminate_dead_code()
    return gm


def _merge_unshards(graph: fx.Graph) -> None:
    first: dict[fx.Node, fx.Node] = {}
    for node in unshards(graph):
        shard = unshard_of(node).shard
        if shard in first:
            node.replace_all_uses_with(first[shard])
            graph.erase_node(node)
        else:
            first[shard] = node


def _merge_reductions(root: fx.Node) -> None:
    """Rewrite a tree of additions with only reductions as leaves into one reduction of the sum."""
    additions: list[fx.Node] = []
    leaves: list[fx.Node] = []
    stack = [root]
    while stack:
        node = stack.pop()
        if node.target is REDUCE_GRAD and len(node.users) == 1:
            leaves.append(node)
        elif node.target is _ADD and not node.kwargs and (node is root or len(node.users) == 1):
            additions.append(node)
            stack.extend(source for source in node.args if isinstance(source, fx.Node))
        else:
            return
    shards = {reduce_grad_of(leaf).shard for leaf in leaves}
    if len(shards) != 1:
        return
    marker = leaves[0]
    for leaf in leaves:
        leaf.replace_all_uses_with(reduce_grad_of(leaf).gradient)
    for addition in sorted(additions):  # fx nodes compare by their order in the graph
        set_value(addition)
    graph = root.graph
    with graph.inserting_after(root):
        merged = graph.call_function(REDUCE_GRAD, marker.args, marker.kwargs)
    merged.meta.update(marker.meta)
    root.replace_all_uses_with(merged, delete_user_cb=lambda user: user is not merged)
    set_args(merged, reduce_grad_of(marker)._replace(gradient=root))
    set_value(merged)
