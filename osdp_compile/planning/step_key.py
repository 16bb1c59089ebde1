"""Step keys: a training step as text, so that a later run knows whether a kept plan is for it.

A Dynamo graph is known before AOTAutograd traces it. Its text is enough for a key if torch alone
decides on the graphs that follow. Operators of other packages, regions with a function of the user
and symbolic sizes are in the text of the captured step, which takes a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from osdp_compile import _torch
from osdp_compile.model.find_modules import static_inputs
from osdp_compile.model.subgraphs import graphs_of
from passes.graph import metadata
from passes.graph.captured import Captured
from passes.graph.fx_utils import hint

_KEYS = sorted(
    value.name
    for value in vars(metadata).values()
    if isinstance(value, metadata.Key) and value not in metadata.MODULE_KEYS
)
#: Metadata of torch that the planner and the passes read.
_READ_KEYS = (*_KEYS, "recompute", "desc", "saved_tensor_with_no_vc_check")
#: Namespaces of torch's own operators, whose name says everything.
TORCHS = ("aten", "prims")
_MODULES = ("torch", "_operator", "math", "builtins")


class Uncertain(Exception):
    """Equal text may be of different steps; the message names the cause."""


def text_of(value: Any) -> str:
    """The text of a value, the same in every process.

    Raises:
        Uncertain: the text would have an address in it.
    """
    text = repr(value)
    if " at 0x" in text:
        raise Uncertain(text)
    return text


def captured_lines(captured: Captured) -> list[str]:
    """A captured step, before ``annotate``, as text.

    Raises:
        Uncertain
    """
    about = sorted(captured.unread), captured.is_joined, captured.border_bytes
    lines = [text_of(about)]
    for gm in (captured.forward, captured.backward):
        lines += graph_lines(gm)
    return lines


def dynamo_lines(gm: fx.GraphModule, inputs: Sequence[Any], names: Mapping[int, str]) -> list[str]:
    """A Dynamo graph, its inputs and torch's settings, as text.

    ``names``: index of a graph input -> its parameter's name.

    Raises:
        Uncertain: more than this text decides on the step.
    """
    check_certain(gm, TORCHS)
    static = {**static_inputs(gm, inputs), **names}
    storages: dict[int, int] = {}
    lines = [f"{static[i]}: {_input_text(value, storages)}" for i, value in enumerate(inputs)]
    return [*lines, *map(text_of, _torch.aot_autograd.settings()), *graph_lines(gm)]


def check_certain(gm: fx.GraphModule, namespaces: Sequence[str]) -> None:
    """Check that the text of a Dynamo graph decides on the graphs that follow from it.

    ``namespaces``: of operators whose name says everything.

    Raises:
        Uncertain
    """
    for node in gm.graph.nodes:
        if not _is_known(node, namespaces):
            raise Uncertain(f"{node.op} {node.target}")
    if _torch.autograd.hooks_saved_tensors():
        raise Uncertain("hooks on saved tensors")


def _is_known(node: fx.Node, namespaces: Sequence[str]) -> bool:
    """Whether the name of a node's operator says everything about it."""
    target: Any = node.target
    if isinstance(target, _torch.operators.OpOverload | _torch.operators.OpOverloadPacket):
        return str(target).split(".")[0] in namespaces
    if node.op in ("placeholder", "output", "call_method"):
        return True
    name = getattr(target, "__qualname__", None)
    if node.op != "call_function" or name is None or "<" in name:
        return False
    owner = (
        getattr(target, "__module__", None) or type(getattr(target, "__self__", None)).__module__
    )
    return owner.split(".")[0] in _MODULES


def _input_text(value: Any, storages: dict[int, int]) -> str:
    """An input of a graph; ``storages``: storages of earlier inputs, by address."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        raise Uncertain(f"an input of type {type(value).__name__}")
    own = storages.setdefault(value.untyped_storage().data_ptr(), len(storages))
    about = own, value.storage_offset(), value.is_leaf, value.is_contiguous(), value._is_view()
    return f"{value_text(value)} {about}"


def graph_lines(gm: fx.GraphModule) -> list[str]:
    """A graph and the graphs that it calls, as text.

    Raises:
        Uncertain
    """
    return [_node_text(node) for graph in graphs_of(gm) for node in graph.nodes]


def _node_text(node: fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    target: Any = node.target
    if not isinstance(
        target, str | _torch.operators.OpOverload | _torch.operators.OpOverloadPacket
    ):
        target = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
    stack = node.meta.get("nn_module_stack")
    parts = [
        node.name,
        node.op,
        str(target),
        text_of((node.args, node.kwargs)),
        value_text(value),
        text_of(list(stack.values())[-1][0] if stack else ""),
        *(f"{key}={text_of(node.meta[key])}" for key in _READ_KEYS if key in node.meta),
    ]
    return " ".join(parts)


def value_text(value: Any) -> str:
    """Type, shape, strides, data type and device of a tensor; a number; as text.

    Raises:
        Uncertain
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise Uncertain(f"a tensor of layout {value.layout}")
        sizes = [value_text(size) for size in (*value.shape, *value.stride())]
        about = value.dtype, value.device, value.requires_grad
        return f"{type(value).__name__}{sizes}{about}"
    if isinstance(value, torch.SymInt):
        return f"{value}={hint(value)}"
    if isinstance(value, list | tuple):
        return str([value_text(one) for one in value])
    return text_of(value) if value is None or isinstance(value, int | float) else str(type(value))
