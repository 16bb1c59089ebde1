"""Subgraphs of a Dynamo graph, such as the bodies of checkpointed regions.

Dynamo represents a region as a call with a graph of its own::

    out = tag_activation_checkpoint(body, x, weight)

The read of a parameter by the region, ``unshard(weight)``, stands in the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx


def graphs_of(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """The module's graph, then its subgraphs."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node's value; for a region, the readers inside the region."""
    for user in node.users:
        region = called_region(user)
        if region is None:
            yield user
            continue
        _, given, placeholders = region
        for argument, placeholder in zip(given, placeholders, strict=True):
            if argument is node:
                yield from readers_of(placeholder)


def called_region(
    call: fx.Node,
) -> tuple[fx.GraphModule, Sequence[object], list[fx.Node]] | None:
    """The graph that a node calls, the arguments for it, and the graph's placeholders.

    None: the node calls no graph, or the graph does not take the last arguments in their order.
    """
    first, owner = next(iter(call.args), None), call.graph.owning_module
    if owner is None or not isinstance(first, fx.Node) or first.op != "get_attr":
        return None
    body = dict(owner.named_modules()).get(str(first.target))
    if not isinstance(body, fx.GraphModule):
        return None
    placeholders = list(body.graph.find_nodes(op="placeholder"))
    begin = len(call.args) - len(placeholders)
    # ``invoke_subgraph`` has its graph's name between the graph and the arguments.
    if begin < 1 or any(isinstance(one, fx.Node) for one in call.args[1:begin]):
        return None
    return body, call.args[begin:], placeholders
