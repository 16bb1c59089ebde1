"""Step modules: the forward and the backward of a training step in one module.

A pass over both graphs gets this module. Its children are the two graphs; its own graph only
returns them.
"""

from __future__ import annotations

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


def saved_count(backward: fx.Graph) -> int:
    """The number of tensors that the forward saves for a backward: its last outputs."""
    given = backward.find_nodes(op="placeholder")
    return sum(not node.name.startswith("tangents") for node in given)


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
