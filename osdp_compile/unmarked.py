"""Unmarked: a graph of a sharded model as if it had been traced with whole parameters.

Capture, and so the pricing of a plan, begins with whole parameters: it puts in markers of
its own, where autograd's graph needs them. A model that was laid out before its first call
is traced with markers from the start::

    local = weight.to_local(); full = unshard(local, ...); linear(x, full)    ->  linear(x, weight)

What is read in another type is cast there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from osdp_compile import _torch
from osdp_compile.roots import placeholders
from osdp_compile.state import ModelParameter
from passes.markers import UNSHARD

_MARKERS = (UNSHARD, UNSHARD.overloadpacket)


def only_reads(gm: fx.GraphModule) -> bool:
    """Whether a graph reads parameters and computes nothing.

    Where Dynamo cannot trace a frame it traces what the frame calls: so each read by itself.
    """
    reads = ("to_local", *_MARKERS)
    return all(n.op in ("placeholder", "output") or n.target in reads for n in gm.graph.nodes)


def unmarked(
    gm: fx.GraphModule, inputs: Sequence[Any], entries: Sequence[ModelParameter]
) -> tuple[fx.GraphModule, list[Any], list[ModelParameter]]:
    """A copy of a Dynamo graph, its inputs and a model's parameters, whole and without memory.

    ``entries``: of the sharded model; what of the graph's inputs is none of them stays as it is.
    """
    whole = {id(entry.parameter): _torch.whole_stand_in(entry.parameter) for entry in entries}
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, nodes))
    given = [whole.get(id(value), value) for value in inputs]
    for node, value in zip(placeholders(gm), given, strict=True):
        _torch.copy_source(node, nodes[node])
        if isinstance(value, nn.Parameter):
            nodes[node].meta["example_value"] = value
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _MARKERS:
            parameter = node.args[0]
            while parameter.op != "placeholder":
                parameter = parameter.all_input_nodes[0]
            if "dtype" in node.kwargs:
                with graph.inserting_before(node):
                    parameter = graph.call_method("to", (parameter, node.kwargs["dtype"]))
            node.replace_all_uses_with(parameter)
    graph.eliminate_dead_code()  # never a placeholder
    held = [dataclasses.replace(e, parameter=whole[id(e.parameter)]) for e in entries]
    return fx.GraphModule(gm, graph), given, held
