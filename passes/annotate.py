"""Annotate: what every node costs.

Needs: ``meta["val"]`` on every node.
Leaves: ``meta["cost"]`` (:class:`Cost`) on every node; the graph is unchanged.

Formulas: FLOPs come from torch's own registry (``torch.utils.flop_counter``). A kernel
takes the time that the profile has measured for it (``kernel_seconds``), or else the larger
of FLOPs over the device's rate and bytes over its memory bandwidth (the roofline); a
collective ``latency + wire bytes x inverse bandwidth``. A fused region costs the bytes that
enter and leave it: each of its nodes is charged for the outside tensors that it is the
first to read and for what it writes to memory.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from passes.context import Context
from passes.fusion import is_fusible, materialized, regions
from passes.graph import (
    ALL_REDUCE,
    COLLECTIVES,
    bytes_of,
    concrete,
    is_alias,
    is_collective,
    is_getitem,
    is_marker,
    is_packing,
    root_of,
    tensor_inputs,
)

log = logging.getLogger("passes")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The price of one node.

    ``memory_bytes``: what its output takes while alive (0: a view, or inside a fused kernel).
    ``seconds``: on the compute stream, or on the network for a collective.
    ``busy_seconds``: of the compute stream, that a collective takes from what runs beside it.
    """

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    memory_bytes: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0


def cost_of(node: fx.Node) -> Cost:
    """The annotation of a node; a node that has none costs nothing."""
    return node.meta.get("cost", _NOTHING)


_NOTHING = Cost()


def _flops(node: fx.Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    kwargs = fx.node.map_arg(node.kwargs, lambda source: source.meta["val"])
    try:
        return int(formula(*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, ValueError, AssertionError) as error:
        log.debug("%s (%s) has no FLOP count, priced by its bytes: %s", node, node.target, error)
        return 0


def collective_full_bytes(node: fx.Node) -> int:
    """Bytes of the whole tensor a collective works on: what all ranks together hold of it."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return max(bytes_of(node.meta["val"]), bytes_of(source.meta["val"]))


def stands_alone(node: fx.Node) -> bool:
    """Whether a node is a kernel of torch's own: no view, nothing fused, none of our own."""
    return node.op == "call_function" and not (
        is_fusible(node)
        or is_alias(node)
        or is_marker(node)
        or is_getitem(node)
        or is_collective(node)
        or is_packing(node)
    )


def kernel_key(node: fx.Node) -> str:
    """What a kernel's time depends on, as text: the operator, shapes, strides and settings."""

    def described(source: fx.Node) -> str:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return str(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{concrete(value.shape)}@{concrete(value.stride())}"

    args = fx.node.map_arg(node.args, described)
    kwargs = fx.node.map_arg(node.kwargs, described)
    return f"{node.target} {args} {kwargs if kwargs else ''}".rstrip()


def annotate(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Put a :class:`Cost` on every node. See the module's docstring."""
    graph = gm.graph
    region = regions(graph)
    real = materialized(graph, region)
    align = ctx.hardware.allocator_alignment_bytes
    hardware_seconds = ctx.hardware.kernel_seconds
    entered: set[tuple[int, fx.Node]] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        own_bytes = 0 if isinstance(value, list | tuple) else bytes_of(value)
        memory_bytes = -(-own_bytes // align) * align if node in real else 0
        if is_collective(node):
            what = COLLECTIVES[node.target], collective_full_bytes(node), ctx.world_size
            node.meta["cost"] = Cost(
                memory_bytes=0 if node.target is ALL_REDUCE else memory_bytes,
                seconds=ctx.hardware.collective_seconds(*what),
                busy_seconds=ctx.hardware.busy_seconds(*what),
            )
            continue
        if node.op != "call_function" or is_alias(node) or is_marker(node) or is_getitem(node):
            node.meta["cost"] = Cost(memory_bytes=memory_bytes)
            continue
        read_bytes = 0
        for source in tensor_inputs(node):
            root = root_of(source)
            if node in region:
                if region.get(root) == region[node] or (region[node], root) in entered:
                    continue
                entered.add((region[node], root))
                # An embedding or a gather reads as much as it gives, not its whole table.
                read_bytes += min(bytes_of(source.meta["val"]), 4 * max(own_bytes, 1024))
            else:
                read_bytes += bytes_of(source.meta["val"])
        write_bytes = bytes_of(value) if node in real else 0
        flops = 0 if node in region else _flops(node)
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
        seconds = max(
            flops / ctx.hardware.flops(str(dtype).removeprefix("torch.")),
            (read_bytes + write_bytes) / ctx.hardware.memory_bytes_per_second,
        )
        if hardware_seconds and stands_alone(node):
            seconds = hardware_seconds.get(kernel_key(node), seconds)
        elif node not in region or node in real:
            seconds += ctx.hardware.launch_seconds
        node.meta["cost"] = Cost(flops, read_bytes, write_bytes, memory_bytes, seconds)
    return gm
