"""Serves: which parameters every node of a graph is there for.

A gather, and what its output passes through, serve what is gathered; a kernel serves the
weights it reads; a gradient, and what packs and reduces it, serve the parameter it is of,
or all of their bucket.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph import is_alias, is_collective, is_getitem, is_packing
from passes.markers import REDUCE_GRAD, UNSHARD
from passes.packing import UNPACK

_CONVERSIONS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


def serves(graph: fx.Graph) -> dict[fx.Node, tuple[str, ...]]:
    """Names of parameters by node, in the graph's order; nodes that serve none are left out."""
    found: dict[fx.Node, tuple[str, ...]] = {}
    weights: set[fx.Node] = set()  # parameters in whatever form: whole, cut, in a bucket
    for node in graph.nodes:
        names, is_weight = _own(node)
        if not names and node.op == "call_function":
            sources = [n for n in node.all_input_nodes if n in weights or _passes_on(node)]
            names = tuple(dict.fromkeys(name for n in sources for name in found.get(n, ())))
            if node.target is UNPACK and len(names) > 1:
                names = _member(node, names)
            is_weight = any(n in weights for n in sources) and (
                _passes_on(node) or node.target in _CONVERSIONS
            )
        if names:
            found[node] = names
        if is_weight:
            weights.add(node)
    leads: set[fx.Node] = set()  # to a reduction: from there back to the kernel that it follows
    for node in reversed(graph.nodes):
        if _reduces(node) or (node in leads and (_passes_on(node) or _has_one_input(node))):
            for source in node.all_input_nodes:
                if source not in weights and source.op == "call_function" and source not in found:
                    found[source] = found[node]
                    leads.add(source)
    return found


def _own(node: fx.Node) -> tuple[tuple[str, ...], bool]:
    """What a node says of itself: the parameters, and whether it is those (or a gradient)."""
    purpose = node.meta.get("collective")
    if node.op == "placeholder":
        name = node.meta.get("parameter") or node.meta.get("gathered")
        return ((str(name),), True) if name else ((), False)
    if is_collective(node) and purpose is not None:
        return purpose.names, purpose.gathers
    if node.target is UNSHARD:
        return (str(node.args[1]),), True
    if node.target is REDUCE_GRAD:
        return (str(node.args[2]),), False
    return (), False


def _reduces(node: fx.Node) -> bool:
    purpose = node.meta.get("collective")
    gathers = purpose is None or purpose.gathers
    return node.target is REDUCE_GRAD or (is_collective(node) and not gathers)


def _passes_on(node: fx.Node) -> bool:
    """Whether a node only lays out anew what goes in."""
    return is_alias(node) or is_packing(node) or is_getitem(node)


def _has_one_input(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1


def _member(node: fx.Node, names: tuple[str, ...]) -> tuple[str, ...]:
    """Which of a bucket's parameters an ``unpack`` takes out: they lie in the bucket's order."""
    packed = node.all_input_nodes[0]
    starts = sorted({user.args[2] for user in packed.users if user.target is UNPACK})  # type: ignore[type-var]
    return (names[starts.index(node.args[2])],) if len(starts) == len(names) else names
