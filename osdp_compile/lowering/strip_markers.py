"""Strip markers: turn a graph of a sharded model into the graph with whole parameters.

Capture, which prices a plan, needs whole parameters: it inserts its own markers where autograd's
graph needs them. A model that ``osdp_compile.shard`` sharded is traced with markers already::

    local = weight.to_local(); full = unshard(local, ...); linear(x, full)    ->  linear(x, weight)

A marker with a ``dtype`` becomes a cast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from osdp_compile import _torch
from osdp_compile.model.find_modules import placeholders
from osdp_compile.model.model_parameters import ModelParameter
from osdp_compile.model.subgraphs import called_region
from passes.ops.markers import UNSHARD_CALLS


def only_reads(gm: fx.GraphModule) -> bool:
    """Whether a graph reads parameters and computes nothing.

    If Dynamo cannot trace a frame, it traces the functions that the frame calls. Each read of a
    parameter is then a graph of its own.
    """
    reads = ("to_local", *UNSHARD_CALLS)
    return all(n.op in ("placeholder", "output") or n.target in reads for n in gm.graph.nodes)


def unmarked(
    gm: fx.GraphModule, inputs: Sequence[Any], entries: Sequence[ModelParameter]
) -> tuple[fx.GraphModule, list[Any], list[ModelParameter]]:
    """A Dynamo graph without markers, its inputs and the parameters, whole and without memory.

    ``entries``: the parameters of the sharded model. Other inputs of the graph stay unchanged.
    """
    whole = {id(e.parameter): _torch.dynamo.whole_stand_in(e.parameter, e.shape) for e in entries}
    given = [whole.get(id(value), value) for value in inputs]
    copied = _copied(gm, given)
    for node, copy in zip(placeholders(gm), placeholders(copied), strict=True):
        _torch.dynamo.copy_source(node, copy)
    held = [dataclasses.replace(e, parameter=whole[id(e.parameter)]) for e in entries]
    return copied, given, held


def _copied(gm: fx.GraphModule, given: Sequence[Any]) -> fx.GraphModule:
    """A copy of a graph, and of the graphs of its regions, without markers.

    ``given``: for each placeholder its parameter, or any other value.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copied = fx.GraphModule(gm, graph)
    of: dict[Any, Any] = dict(zip(placeholders(copied), given, strict=True))
    for node, value in of.items():
        if isinstance(value, nn.Parameter):
            node.meta["example_value"] = value
    for node in list(graph.nodes):
        region = called_region(node)
        if region is not None:
            body, given_inside, _ = region
            inside = [of.get(argument) for argument in given_inside]
            copied.set_submodule(str(node.args[0].target), _copied(body, inside))
        elif node.op == "call_function" and node.target in UNSHARD_CALLS:
            parameter = node.args[0]
            while parameter.op != "placeholder":
                parameter = parameter.all_input_nodes[0]
            if "dtype" in node.kwargs:
                with graph.inserting_before(node):
                    parameter = graph.call_method("to", (parameter, node.kwargs["dtype"]))
            node.replace_all_uses_with(parameter)
    graph.eliminate_dead_code()  # it keeps placeholders
    copied.recompile()
    return copied
