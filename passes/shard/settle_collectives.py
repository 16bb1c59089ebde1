"""Settle: each collective of the model itself becomes one operator with its wait.

Needs: a graph without collectives of ours (before ``shard``).
Leaves: ``osdp::model_*`` operators (``passes/ops/model_collectives.py``) where the waits were.

A model with tensor parallelism has collectives of its own. Later passes order ours and know their
buffers. To these passes a model's own collective is an operator like any other: it stays at its
place. Only the simulator and the scheduler see that it is on the network.
"""

from __future__ import annotations

from torch import fx

from passes.graph.fx_utils import WAIT
from passes.ops.model_collectives import AT_ONCE
from passes.types.context import Context


class UnknownCollective(ValueError):
    """The model's own collective has no operator here."""


def settle(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Replace the model's own collectives. See the module's docstring.

    Raises:
        UnknownCollective: for a kind that is not supported, or one whose result is not waited for;
            names the node.
    """
    graph = gm.graph
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", None) != "_c10d_functional" or node.target is WAIT:
            continue
        if node.target not in AT_ONCE or any(user.target is not WAIT for user in node.users):
            raise UnknownCollective(
                f"node {node.name!r}: the model's own collective {node.target} is not supported "
                "beside backend='osdp'. Known are all-reduce, all-gather and reduce-scatter, each "
                "waited for: use another layout in parallelize_module, or leave this part of the "
                "model uncompiled (torch.compiler.disable)"
            )
        waits = list(node.users)
        with graph.inserting_before(waits[0]):
            settled = graph.call_function(AT_ONCE[node.target], node.args, node.kwargs)
        settled.meta = dict(node.meta)
        for wait in waits:
            wait.replace_all_uses_with(settled)
            graph.erase_node(wait)
        graph.erase_node(node)
    return gm
