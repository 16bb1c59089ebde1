"""Find the modules that own a graph's parameters, from Dynamo's sources of the graph inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.model.subgraphs import readers_of
from passes.ops.markers import UNSHARD_CALLS, unshard_of


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def plain_parameters(
    gm: fx.GraphModule, inputs: Sequence[Any]
) -> list[tuple[fx.Node, nn.Parameter]]:
    """The graph inputs that are parameters and that no plan has laid out yet."""
    return [
        (node, value)
        for node, value in zip(placeholders(gm), inputs, strict=True)
        if isinstance(value, nn.Parameter)
        and not isinstance(value, DTensor)
        and marked_name(node) is None
    ]


def static_inputs(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    name_of: Callable[[nn.Parameter], str | None] = lambda parameter: None,
) -> dict[int, str]:
    """Index of each graph input -> a parameter's or buffer's name, or ``batch``.

    The model or the caller holds the memory of all inputs; the graph owns none of it.
    ``name_of``: gives the name of a parameter that a plan has laid out. A parameter without a name
    gets its node's name.
    """
    names: dict[int, str] = {}
    for index, (node, value) in enumerate(zip(placeholders(gm), inputs, strict=True)):
        if isinstance(value, nn.Parameter):
            names[index] = name_of(value) or node.name
        elif "_buffers" in (_torch.dynamo.source_chain(node) or [""])[-1]:
            names[index] = node.name
        else:
            names[index] = "batch"
    return names


def marked_name(node: fx.Node) -> str | None:
    """The parameter name in the markers that read a graph input; None: not read through markers.

    For parameters that stay plain tensors: of a DTensor the markers read the local tensor.
    """
    names = {
        unshard_of(user).name if user.target in UNSHARD_CALLS else None for user in readers_of(node)
    }
    return names.pop() if len(names) == 1 else None


def find_roots(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[str, nn.Module]]:
    """(prefix, module) of the outermost modules that own the graph's plain parameters.

    A single root has the prefix ``""``. Several roots have the last name of the expression that
    leads to each (``gen`` for ``L['self'].gen``).

    Raises:
        OsdpError: naming a parameter that belongs to no module.
    """
    roots: dict[int, tuple[str, nn.Module]] = {}
    owned: dict[int, frozenset[int]] = {}  # module -> its parameters, both by id
    for node, parameter in plain_parameters(gm, inputs):
        for expression, owner in _torch.dynamo.evaluate_prefixes(node):
            if not isinstance(owner, nn.Module):
                continue
            if id(owner) not in owned:
                owned[id(owner)] = frozenset(id(p) for p in owner.parameters())
            if id(parameter) in owned[id(owner)]:
                roots.setdefault(id(owner), (_label(expression), owner))
                break
        else:
            where = (_torch.dynamo.source_chain(node) or [node.name])[-1]
            raise OsdpError(
                f"parameter {where} belongs to no nn.Module, so its reads cannot be redirected to "
                "a shard: make it an attribute of a module, or compile this function with another "
                "backend"
            )
    found = [root for root in roots.values() if not _inside_another(root[1], roots)]
    if len(found) == 1:
        return [("", found[0][1])]
    labels = [label for label, _ in found]
    return [
        (label if labels.count(label) == 1 else f"{label}{index}", module)
        for index, (label, module) in enumerate(found)
    ]


def _inside_another(module: nn.Module, roots: dict[int, tuple[str, nn.Module]]) -> bool:
    return any(
        module is not other and any(module is part for part in other.modules())
        for _, other in roots.values()
    )


def _label(expression: str) -> str:
    """The last identifier of an expression: ``L['step'].model`` gives ``model``."""
    word = "".join(c if c.isalnum() or c == "_" else " " for c in expression).split()
    return word[-1] if word else "model"
