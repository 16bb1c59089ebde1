"""Skeleton: the collectives and waits of a graph, and the seconds of computing between them.

A measured step is compared with its skeleton, because a clock sees the calls of collectives and
waits, not the nodes of the graph. The simulator gives both graphs the same time. A skeleton is
small, and refers to no node of its graph.

Needs: ``annotate``, and the final order. Leaves: the graph unchanged.

Before::                              The skeleton::

    a = mm(...); b = pack(a)              kernels(); fused()
    start = all_gather(b)                 start = all_gather(x)
    c = mm(...); d = gelu(c)              kernels(); fused()
    w = wait(start)                       w = wait(start)
    ...                                   kernels(); fused()
"""

from __future__ import annotations

from torch import fx

from passes.annotate.annotate_costs import cost_of, stands_alone
from passes.graph.fx_utils import WAIT, group_of, is_collective, is_model_collective
from passes.graph.metadata import COST
from passes.types.annotations import Cost


def kernels() -> None:
    """Stands for kernels of torch's own between two collectives or waits."""


def fused() -> None:
    """Stands for all other computing between two collectives or waits."""


def skeleton_of(graph: fx.Graph) -> fx.Graph:
    """The skeleton of an annotated graph. See the module's docstring."""
    skeleton = fx.Graph()
    source = skeleton.placeholder("x")
    copies: dict[fx.Node, fx.Node] = {}
    seconds = {kernels: 0.0, fused: 0.0}

    def computing() -> None:
        for target in seconds:
            COST.set(skeleton.call_function(target), Cost(seconds=seconds[target]))
            seconds[target] = 0.0

    for node in graph.nodes:
        waits_for = copies.get(node.args[0]) if node.target is WAIT else None
        if is_collective(node) or is_model_collective(node):
            computing()
            copies[node] = skeleton.call_function(node.target, (source, group_of(node)))
            COST.set(copies[node], cost_of(node))
        elif waits_for is not None:
            computing()
            COST.set(skeleton.call_function(WAIT, (waits_for,)), cost_of(node))
        else:
            seconds[kernels if stands_alone(node) else fused] += cost_of(node).seconds
    computing()
    skeleton.output(None)
    return skeleton


def stalls(node: fx.Node) -> bool:
    """Whether compute waits at a node: at a wait, or at a collective of the model itself."""
    return node.target is WAIT or is_model_collective(node)


def is_computing(node: fx.Node) -> bool:
    """Whether a skeleton's node stands for computing."""
    return node.target in (kernels, fused)
