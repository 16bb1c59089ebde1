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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from passes.annotate.annotate_costs import cost_of, stands_alone
from passes.graph.fx_utils import WAIT, group_of, is_collective, is_model_collective
from passes.graph.metadata import COST
from passes.types.annotations import Cost


def kernels() -> None:
    """Stands for kernels of torch's own between two collectives or waits."""


def fused() -> None:
    """Stands for all other computing between two collectives or waits."""


_COMPUTING = {"kernels": kernels, "fused": fused}


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


class Row(NamedTuple):
    """One node of a skeleton.

    ``operator``: ``kernels``, ``fused``, or the name of an operator.
    ``group``: the process group of a collective; None: it is none, or has none.
    ``waits_for``: the row of the collective that a wait is for.
    """

    operator: str
    group: str | None
    waits_for: int | None
    cost: Cost


def rows_of(skeleton: fx.Graph) -> tuple[Row, ...]:
    """A skeleton as plain data; :func:`of_rows` makes it again."""
    rows: dict[fx.Node, Row] = {}
    places: dict[fx.Node, int] = {}
    for node in (one for one in skeleton.nodes if one.op == "call_function"):
        target: Any = node.target
        is_ours = is_computing(node)
        waits_for = places[node.all_input_nodes[0]] if target is WAIT else None
        group = None if is_ours or waits_for is not None else node.args[1]
        places[node] = len(rows)
        name = target.__name__ if is_ours else str(target)
        rows[node] = Row(name, group, waits_for, COST.of(node))
    return tuple(rows.values())


def of_rows(rows: Sequence[Row]) -> fx.Graph:
    """The skeleton with these rows."""
    skeleton = fx.Graph()
    source = skeleton.placeholder("x")
    made: list[fx.Node] = []
    for row in rows:
        if row.operator in _COMPUTING:
            node = skeleton.call_function(_COMPUTING[row.operator])
        elif row.waits_for is not None:
            node = skeleton.call_function(WAIT, (made[row.waits_for],))
        else:
            namespace, name, overload = row.operator.split(".")
            target = getattr(getattr(getattr(torch.ops, namespace), name), overload)
            node = skeleton.call_function(target, (source, row.group))
        COST.set(node, row.cost)
        made.append(node)
    skeleton.output(None)
    return skeleton


def stalls(node: fx.Node) -> bool:
    """Whether compute waits at a node: at a wait, or at a collective of the model itself."""
    return node.target is WAIT or is_model_collective(node)


def is_computing(node: fx.Node) -> bool:
    """Whether a skeleton's node stands for computing."""
    return node.target in (kernels, fused)
