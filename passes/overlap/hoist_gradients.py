"""Hoist: compute each parameter's gradient as early as its inputs allow.

Needs: a backward graph with one ``reduce_grad`` marker per parameter.
Leaves: the same nodes. A marker, and the nodes that only its gradient needs, stand no later than
directly after the last of their inputs.

Before::                              After::

    dx = mm(dy, w)                        r = reduce_grad(mm(dy.T, x), p)
    r = reduce_grad(mm(dy.T, x), p)       dx = mm(dy, w)

Autograd computes the gradient of the input before the gradient of the weight. The reverse order
computes the same and has three advantages: the reduction can start one matrix product earlier, the
gather of the weight for ``dx`` can hide behind one more product, and ``x`` is freed before ``dx``
is allocated.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.fx_utils import is_collective, last_of, positions
from passes.graph.op_traits import tags_of
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.types.context import Context


def hoist(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Move the gradient of each parameter up. See the module's docstring."""
    graph = gm.graph
    order = positions(graph)
    inputs = graph.find_nodes(op="placeholder")
    last_moved: dict[fx.Node, fx.Node] = {}  # by anchor, the last node that was moved behind it
    markers = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    # Sort by gradient: the planned and the lowered graph have their markers at different places.
    for marker in sorted(markers, key=lambda marker: order[marker.args[0]]):
        own = _needed_for(marker)
        needs = [source for node in own for source in node.all_input_nodes if source not in own]
        # No node belongs to two gradients, so the inputs keep their places.
        anchor = last_of([*inputs[-1:], *needs], order)
        place = last_moved.get(anchor, anchor)
        for node in sorted(own, key=order.__getitem__):
            # Leave nodes above the anchor there, such as the first of several gradients to be
            # added: its inputs can then be freed early.
            if order[node] > order[anchor]:
                place.append(node)
                place = node
        last_moved[anchor] = place
    return gm


def _needed_for(marker: fx.Node) -> dict[fx.Node, None]:
    """A ``reduce_grad`` marker and the nodes that only it needs."""
    own: dict[fx.Node, None] = {marker: None}
    stack = [marker]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in own and _movable(source) and all(user in own for user in source.users):
                own[source] = None
                stack.append(source)
    return own


def _movable(node: fx.Node) -> bool:
    """Whether a node gives the same result at any place. Random operators must keep their order."""
    if node.op != "call_function" or node.target is UNSHARD or is_collective(node):
        return False
    seeded = torch.Tag.nondeterministic_seeded in tags_of(node.target)
    # ``prims.inductor_*``: Inductor's random seeds, and the random numbers made from them.
    return not (seeded or node.is_impure() or str(node.target).startswith("prims.inductor_"))
