"""Double backward: refuse it for compiled graphs, as torch.compile does not support it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from osdp_compile import _torch
from osdp_compile.errors import OsdpError


def refusing_double_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the compiled function of a frame; a backward through its backward is an error.

    ``create_graph=True`` alone is not: many scripts pass it and never use the graph.
    """

    def watched(*args: Any, **kwargs: Any) -> Any:
        outputs = function(*args, **kwargs)
        for node in _nodes(outputs):
            node.register_hook(_refuse_where_graph_is_created)
        return outputs

    return _torch.aot_autograd.with_attributes(watched, function)


def _nodes(values: Sequence[Any]) -> set[Node]:
    """The autograd nodes that made these values, each once."""
    made = {one.grad_fn for one in values if isinstance(one, Tensor)}
    return {node for node in made if node is not None}


def _refuse_where_graph_is_created(
    grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
) -> None:
    """Hook of a backward node; inside it autograd records under ``create_graph=True`` only."""
    if not torch.is_grad_enabled():
        return
    for node in _nodes(grad_inputs):
        node.register_prehook(_refuse)


def _refuse(grad_outputs: Sequence[Tensor | None]) -> None:
    raise OsdpError(
        "a second derivative goes through the compiled model (create_graph=True, as for a gradient "
        "penalty), and torch.compile has none. Leave the model that needs it uncompiled, in "
        "DistributedDataParallel; others may use backend='osdp'"
    )
