"""Step modules: the forward and the backward of a training step in one module.

A pass over both graphs gets this module. Its children are the two graphs; its own graph only
returns them.
"""

from __future__ import annotations

from torch import fx, nn

from passes.graph.fx_utils import module_of

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
