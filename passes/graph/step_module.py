"""Step modules: the forward and the backward of a training step in one module.

A pass over both graphs gets this module. Its children are the two graphs; its own graph only
returns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx, nn

from passes.graph.fx_utils import module_of
from passes.graph.metadata import SAVED, SAVES

_FORWARD, _BACKWARD = "forward_graph", "backward_graph"


def step_module(forward: fx.GraphModule, backward: fx.GraphModule) -> fx.GraphModule:
    """A module with the two graphs as children."""
    graph = fx.Graph()
    graph.output(tuple(graph.get_attr(name) for name in (_FORWARD, _BACKWARD)))
    owner = nn.Module()
    owner.add_module(_FORWARD, forward)
    owner.add_module(_BACKWARD, backward)
    return module_of(owner, graph)


def graphs_of(step: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a :func:`step_module`."""
    forward, backward = step.get_submodule(_FORWARD), step.get_submodule(_BACKWARD)
    assert isinstance(forward, fx.GraphModule) and isinstance(backward, fx.GraphModule)
    return forward, backward


def saved_inputs(backward: fx.Graph) -> list[fx.Node]:
    """The inputs of a backward that its forward saves: all but the incoming gradients."""
    given = backward.find_nodes(op="placeholder")
    return [node for node in given if not node.name.startswith("tangents")]


def saved_count(backward: fx.Graph) -> int:
    """The number of tensors that the forward saves for a backward: its last outputs."""
    return len(saved_inputs(backward))


def saved_name(node: fx.Node) -> str:
    """The name of the forward's node whose result a node of the backward has."""
    return SAVES.get(node, node.name)


def rename_saved(inputs: Iterable[fx.Node], replaced: Mapping[str, str]) -> None:
    """Give inputs of a backward the names of the nodes that are in the place of replaced ones.

    ``replaced``: by name of a node that the forward has no more, the name of the node in its place,
    which may be replaced in turn.
    """
    for node in inputs:
        now = name = saved_name(node)
        while now in replaced:
            now = replaced[now]
        if now != name:
            SAVES.set(node, now)


def saved_input(backward: fx.Graph, of: fx.Node) -> fx.Node:
    """Insert an input of a backward for a tensor of the forward.

    An input of the forward is not marked as saved: the graphs do not own its memory.
    """
    found = backward.placeholder(of.name)
    found.target = found.name  # in the code, another input could have the name of the target
    found.meta["val"] = of.meta["val"]
    SAVES.set(found, of.name)
    if of.op != "placeholder":
        SAVED.set(found, True)
    return found
