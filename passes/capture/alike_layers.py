"""Alike layers: the layers of a captured step, and whether they are equal node by node.

A layer's number is the number in its parameters' names (with several lists of modules, in the list
with the most bytes). A forward node belongs to the last layer whose parameters it depends on, a
backward node to the first one; layer 0 means no dependency.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import fx

from passes.graph.captured import Captured
from passes.graph.metadata import PARAMETER, SAVED
from passes.graph.step_module import saved_name
from passes.ops.markers import unshard_of, unshards
from passes.types.context import Parameter, Phase


def layers_of(captured: Captured, parameters: Sequence[Parameter]) -> tuple[tuple[str, ...], ...]:
    """Parameter names by layer, in the order in which the forward reads the layers.

    Corresponding parameters are at the same place. Empty if there are no layers, or if their
    parameters differ in shape, dtype or ``requires_grad``.
    """
    lists: dict[str, dict[str, dict[str, Parameter]]] = {}
    for parameter in parameters:
        for found in re.finditer(r"(?<![^.])\d+(?![^.])", parameter.name):
            prefix, rest = parameter.name[: found.start()], parameter.name[found.end() :]
            lists.setdefault(prefix, {}).setdefault(found.group(), {})[rest] = parameter
    sizes = {
        prefix: sum(one.full_bytes for own in members.values() for one in own.values())
        for prefix, members in lists.items()
    }
    if not sizes:
        return ()
    chosen = lists[max(sizes, key=lambda prefix: (sizes[prefix], -len(prefix)))]
    read: dict[str, None] = {}
    member_of = {one.name: key for key, own in chosen.items() for one in own.values()}
    for node in unshards(captured.forward.graph):
        name = unshard_of(node).name
        if name in member_of:
            read[member_of[name]] = None
    if not read:
        return ()
    first = chosen[next(iter(read))]
    kinds = {rest: (one.shape, one.dtype, one.requires_grad) for rest, one in first.items()}
    for key in read:
        own = {r: (one.shape, one.dtype, one.requires_grad) for r, one in chosen[key].items()}
        if own != kinds:
            return ()
    return tuple(tuple(chosen[key][rest].name for rest in kinds) for key in read)


def layers_of_nodes(
    graph: fx.Graph, phase: Phase, number: dict[str, int], saved_in: dict[str, int], last: int
) -> dict[fx.Node, int]:
    """The layer of every node, numbered from 1; 0: it depends on no layer."""
    layer: dict[fx.Node, int] = {}
    for node in graph.nodes:
        name = PARAMETER.get(node)
        if node.op == "placeholder":
            if name is not None:
                layer[node] = number.get(name, 0)
            elif phase is Phase.BACKWARD:
                # A saved tensor, or an incoming gradient.
                layer[node] = saved_in.get(saved_name(node), last)
            else:
                layer[node] = 0
            continue
        of_layers = [layer[source] for source in node.all_input_nodes if layer[source]]
        choose = max if phase is Phase.FORWARD else min
        layer[node] = choose(of_layers, default=0)
    return layer


def give_to_readers(graph: fx.Graph, layer: dict[fx.Node, int]) -> None:
    """Give operators that depend on no layer to the layer that alone reads them.

    Each frame of a joined step makes such tensors for itself, constants among them. In a step of
    one graph all layers share them.
    """
    for node in reversed(graph.nodes):
        readers = {layer[user] for user in node.users if user.op != "output"}
        if node.op == "call_function" and not layer[node] and len(readers) == 1:
            layer[node] = readers.pop()


def are_equal(
    kinds: Mapping[int, list[tuple[Hashable, ...]] | None], before: int, behind: int
) -> bool:
    """Whether all layers have the same nodes, by their descriptions (:func:`descriptions`).

    ``before``, ``behind``: the layers at the gap.
    """
    for index, own in kinds.items():
        # Compare the reads only where the neighbours are equal layers too.
        compared = slice(None) if before <= index <= behind else slice(3)
        if own is None or [one[compared] for one in own] != [
            one[compared] for one in kinds[before] or ()
        ]:
            return False
    return True


def descriptions(
    nodes: Sequence[fx.Node],
    layer: dict[fx.Node, int],
    place: dict[fx.Node, int],
    number: dict[str, int],
) -> list[tuple[Hashable, ...]] | None:
    """A description of a layer's nodes without its number; None: it reads beyond its neighbours.

    For each node: the operator, its other arguments, its shape and dtype, and last its inputs.
    """
    found: list[tuple[Hashable, ...]] = []
    for node in nodes:
        read: list[Hashable] = []
        for source in node.all_input_nodes:
            away = layer[source] - layer[node] if layer[source] else None
            if away is None:
                read.append(source.name)  # shared by all layers
            elif abs(away) <= 1:
                read.append((away, place[source]))
            else:
                return None
        args = [(isinstance(one, str) and one in number) or one for one in node.args]
        given = str(fx.node.map_arg(args, lambda _: "tensor")), str(node.kwargs)
        value = node.meta.get("val")
        kind = (str(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else ()
        is_input = node.op == "placeholder"
        what = bool(SAVED.get(node)) if is_input else str(node.target)
        found.append(((node.op, what), given, kind, tuple(read)))
    return found
