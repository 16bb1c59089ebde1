"""The canonical text of a graph, for readers and for CI snapshots.

One line per node: name, dtype and shape, operator and arguments, and a collective's purpose. The
text is equal on every rank, run and machine. Process groups are named by role. The rows of an
uneven shard differ between ranks and are printed as ``?``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from passes._torch import OpOverload
from passes.graph.metadata import COLLECTIVE, INPUT, PARAMETER
from passes.ops.markers import REDUCE_GRAD
from passes.ops.packing import TRIM_ROWS
from passes.types.context import Context

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}


def graph_text(gm: fx.GraphModule, ctx: Context) -> str:
    """The canonical text of a graph. See the module's docstring."""
    shown = [node for node in gm.graph.nodes if not _is_object(node)]
    names = {node: f"%{index}" for index, node in enumerate(shown)}
    uneven = _uneven(gm.graph, ctx)
    lines = [_line(node, names, ctx, uneven) for node in shown]
    return "\n".join(lines) + "\n"


def _is_object(node: fx.Node) -> bool:
    """Whether an input is no tensor or number: some torch versions pass device meshes."""
    numbers = (torch.Tensor, torch.SymInt, torch.SymFloat, int, float, bool)
    return node.op == "placeholder" and not isinstance(node.meta.get("val"), numbers)


def _uneven(graph: fx.Graph, ctx: Context) -> set[fx.Node]:
    """The nodes whose first dimension differs between ranks."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if PARAMETER.is_set(node) and PARAMETER.of(node) in ctx.plan:
            row = ctx.plan[PARAMETER.of(node)]
            if row.decision.sharded and row.shape[row.dim] % ctx.cut(row.decision).ranks:
                found.add(node)
        elif (node.target is REDUCE_GRAD or node.target is TRIM_ROWS) and node.args[1] in found:
            found.add(node)
    return found


def _line(node: fx.Node, names: Mapping[fx.Node, str], ctx: Context, uneven: set[fx.Node]) -> str:
    if node.op == "placeholder":
        label = PARAMETER.get(node) or INPUT.get(node) or "saved"
        return f"{names[node]}: {_type(node, uneven)} = input[{label}]"
    if node.op == "output":
        return f"return {_argument(node.args[0], names, ctx)}"
    if node.op == "get_attr":
        return f"{names[node]}: {_type(node, uneven)} = constant[{node.target}]"
    arguments = [_argument(argument, names, ctx) for argument in node.args]
    arguments += [f"{k}={_argument(v, names, ctx)}" for k, v in sorted(node.kwargs.items())]
    purpose = COLLECTIVE.get(node)
    note = f"  # {purpose.label}" if purpose is not None else ""
    return f"{names[node]}: {_type(node, uneven)} = {_target(node)}({', '.join(arguments)}){note}"


def _target(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def _type(node: fx.Node, uneven: set[fx.Node]) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes = [str(size) for size in value.shape]
        if node in uneven and sizes:
            sizes[0] = "?"
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(sizes)}]"
    if isinstance(value, list | tuple):
        return f"({len(value)} values)"
    return "number"


def _argument(value: object, names: Mapping[fx.Node, str], ctx: Context) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        items = [v for v in value if not isinstance(v, fx.Node) or v in names]
        return "[" + ", ".join(_argument(item, names, ctx) for item in items) + "]"
    if isinstance(value, str) and value == ctx.group_name:
        return "<data-parallel group>"
    for dim in ctx.mesh_dims or ():
        if isinstance(value, str) and value == dim.group_name:
            return f"<{dim.name} group>"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    if isinstance(value, torch.device):
        return value.type
    return repr(value)
