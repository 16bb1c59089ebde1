"""Hoist: a gradient is computed, and its reduction can start, as soon as what it needs is there.

Needs: a backward graph with ``reduce_grad`` markers, one a parameter.
Leaves: the same nodes; what only a parameter's gradient needs, and its marker, stand no later than
right after the last node that they all depend on.

Before::                              After::

    dx = mm(dy, w)                        r = reduce_grad(mm(dy.T, x), p)
    r = reduce_grad(mm(dy.T, x), p)       dx = mm(dy, w)

Autograd computes what is passed on before the gradient of a weight. The other way round the same
is computed, the network has a gradient to send one matrix product earlier, a weight that is
gathered for ``dx`` has one more to arrive in, and ``x`` is freed before ``dx`` is there.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.fx_utils import is_collective, last_of, positions
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.types.context import Context


def hoist(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Move each parameter's gradient up. See the module's docstring."""
    graph = gm.graph
    order = positions(graph)
    inputs = graph.find_nodes(op="placeholder")
    last_moved: dict[fx.Node, fx.Node] = {}  # behind each node that anything was moved behind
    markers = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    # Where markers stand is not the same in the graph that is planned on and in what is lowered.
    for marker in sorted(markers, key=lambda marker: order[marker.args[0]]):
        own = _needed_for(marker)
        needs = [source for node in own for source in node.all_input_nodes if source not in own]
        # No node is in two gradients' own: what is needed stands where it stood.
        anchor = last_of([*inputs[-1:], *needs], order)
        place = last_moved.get(anchor, anchor)
        for node in sorted(own, key=order.__getitem__):
            # What stands further up stays there, as the first of several gradients that are added
            # up: what it is made of can be freed.
            if order[node] > order[anchor]:
                place.append(node)
                place = node
        last_moved[anchor] = place
    return gm


def _needed_for(marker: fx.Node) -> dict[fx.Node, None]:
    """A reduction and the nodes that nothing else needs."""
    own: dict[fx.Node, None] = {marker: None}
    stack = [marker]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in own and _movable(source) and all(user in own for user in source.users):
                own[source] = None
                stack.append(source)
    return own


def _movable(node: fx.Node) -> bool:
    """Whether a node does the same wherever it stands: random numbers come in their order."""
    if node.op != "call_function" or node.target is UNSHARD or is_collective(node):
        return False
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    # Inductor's own random numbers: seeds, and what is made of them.
    return not (seeded or node.is_impure() or str(node.target).startswith("prims.inductor_"))
