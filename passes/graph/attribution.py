"""Attribution: the parameters that each node of a graph serves.

A gather and the views and copies of its output serve the gathered parameters. A kernel serves the
weights that it reads. A gradient, its packing and its reduction serve the gradient's parameter, or
all parameters of the bucket.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.dataflow import Dataflow, OpTraits
from passes.graph.fx_utils import is_collective
from passes.graph.metadata import COLLECTIVE, GATHERED, PARAMETER
from passes.ops.markers import REDUCE_GRAD, UNSHARD, reduce_grad_of, unshard_of
from passes.ops.packing import UNPACK

_CONVERSIONS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


def attribution(dataflow: Dataflow) -> list[tuple[str, ...]]:
    """Names of parameters for every node, in graph order; empty for nodes that serve none."""
    found, weight = _weights_and_readers(dataflow)
    _add_gradient_kernels(dataflow, found, weight)
    return found


def _weights_and_readers(dataflow: Dataflow) -> tuple[list[tuple[str, ...]], list[bool]]:
    """By node, the parameters from its metadata and inputs, and whether it is a weight.

    A weight is a parameter in any form: full, shard, in a bucket.
    """
    found: list[tuple[str, ...]] = [()] * len(dataflow.nodes)
    weight = [False] * len(dataflow.nodes)
    for index, node in enumerate(dataflow.nodes):
        traits = dataflow.traits[index]
        called = dataflow.called[index]
        names: tuple[str, ...] = ()
        if traits.collective or traits.marker or node.op == "placeholder":
            names, weight[index] = _own(node)
        if not names and called:
            sources = dataflow.inputs[index]
            passes_on = _passes_on(traits)
            if not passes_on:
                sources = [source for source in sources if weight[source]]
            if not sources:
                continue
            names = found[sources[0]]
            if len(sources) > 1:
                names = tuple(dict.fromkeys(name for one in sources for name in found[one]))
            if node.target is UNPACK and len(names) > 1:
                names = _member(node, names)
            weight[index] = (passes_on or node.target in _CONVERSIONS) and any(
                map(weight.__getitem__, sources)
            )
        found[index] = names
    return found, weight


def _add_gradient_kernels(
    dataflow: Dataflow, found: list[tuple[str, ...]], weight: list[bool]
) -> None:
    """Add to ``found`` the nodes from each reduction back to the kernel of its gradient."""
    leads: set[int] = set()
    for index in range(len(dataflow.nodes) - 1, -1, -1):
        if index in leads:
            goes_on = _passes_on(dataflow.traits[index]) or len(dataflow.inputs[index]) == 1
        else:
            goes_on = False
        if goes_on or _reduces(dataflow.nodes[index], dataflow.traits[index]):
            for source in dataflow.inputs[index]:
                if not weight[source] and dataflow.called[source] and not found[source]:
                    found[source] = found[index]
                    leads.add(source)


def _own(node: fx.Node) -> tuple[tuple[str, ...], bool]:
    """Parameters in a node's metadata or arguments; whether it is a weight (or a gradient)."""
    purpose = COLLECTIVE.get(node)
    if node.op == "placeholder":
        name = PARAMETER.get(node) or GATHERED.get(node)
        return ((name,), True) if name else ((), False)
    if is_collective(node) and purpose is not None:
        return purpose.names, purpose.gathers_weights
    if node.target is UNSHARD:
        return (unshard_of(node).name,), True
    if node.target is REDUCE_GRAD:
        return (reduce_grad_of(node).name,), False
    return (), False


def _reduces(node: fx.Node, traits: OpTraits) -> bool:
    if not traits.collective:
        return node.target is REDUCE_GRAD
    purpose = COLLECTIVE.get(node)
    return purpose is not None and not (purpose.gathers or purpose.tokens)


def _passes_on(traits: OpTraits) -> bool:
    """Whether a node only rearranges its input."""
    return traits.alias or traits.packing or traits.getitem


def _member(node: fx.Node, names: tuple[str, ...]) -> tuple[str, ...]:
    """The parameter that an ``unpack`` reads from a bucket; columns follow the names' order."""
    packed = node.all_input_nodes[0]
    starts = sorted({user.args[2] for user in packed.users if user.target is UNPACK})  # type: ignore[type-var]
    return (names[starts.index(node.args[2])],) if len(starts) == len(names) else names
