"""Annotate: what every node costs.

Needs: ``meta["val"]`` on every node.
Leaves: ``meta[COST]`` (:class:`Cost`), ``meta[PHASE]`` (forward or backward) and
``meta[REGION]`` (of fused nodes, else None) on every node; the graph is unchanged.

Formulas: FLOPs are in ``passes/annotate/flops.py``. A kernel takes the time that the profile has
measured for it (``kernel_seconds``), or else the larger of FLOPs over the device's rate and
bytes over its memory bandwidth (the roofline); a collective ``latency + wire bytes x inverse
bandwidth``, by the rates and the ranks of its process group. A fused region costs the bytes that
enter and leave it: each of its nodes is charged for the outside tensors that it is the first to
read and for what it writes to memory. A node without a formula is priced by its bytes, and named
once at debug level.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from passes.annotate.flops import flops_of
from passes.annotate.fusion_regions import NO_REGION, materialized, regions
from passes.annotate.workspace import workspace_bytes
from passes.graph.attribution import attribution
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import (
    ALL_REDUCE,
    COLLECTIVES,
    bytes_of,
    concrete,
    group_of,
    is_alias,
    is_collective,
    is_getitem,
    is_marker,
    is_packing,
    once_for,
)
from passes.graph.metadata import COST, DATAFLOW, PHASE, REGION
from passes.graph.op_traits import is_fusible
from passes.ops.packing import PICKING
from passes.types.context import Context


@dataclasses.dataclass(frozen=True)
class Cost:
    """The price of one node.

    ``memory_bytes``: what its output takes while alive (0: a view, or inside a fused kernel).
    ``workspace_bytes``: what it takes besides, only while it runs
    (``passes/annotate/workspace.py``); a collective until it is waited for (``Context.staged``).
    ``seconds``: on the compute stream, or on the network for a collective.
    ``busy_seconds``: of the compute stream, that a collective takes from what runs beside it.
    ``wake_seconds``: that a collective ends later if nothing was in flight as it was started.
    ``serves``: the parameters it is there for (``passes/graph/attribution.py``).
    ``in_function``: its kernel is one C++ function with those beside it
    (``passes/simulate/memory.py``).
    """

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    memory_bytes: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    wake_seconds: float = 0.0
    serves: tuple[str, ...] = ()
    workspace_bytes: int = 0
    in_function: bool = False


def cost_of(node: fx.Node) -> Cost:
    """The annotation of a node; a node that has none costs nothing."""
    return node.meta.get(COST, _NOTHING)


_NOTHING = Cost()


def region_of(node: fx.Node) -> int | None:
    """The fused region of an annotated node (``passes/graph/op_traits.py``); None: it has none."""
    return node.meta.get(REGION)


def collective_full_bytes(node: fx.Node) -> int:
    """Bytes of the whole tensor a collective works on: what its ranks together hold of it."""
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


def _packing_read_bytes(node: fx.Node) -> int:
    """What a copy into or out of a collective reads: of a bucket its own columns only."""
    sources = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
    read_bytes = sum(bytes_of(s.meta["val"]) for s in sources if isinstance(s, fx.Node))
    if node.target in PICKING:
        return min(read_bytes, bytes_of(node.meta["val"]))
    return read_bytes


def _dtype_of(value: object) -> str:
    """The dtype's name of a result, of the first of several; ``float32`` where there is none."""
    if isinstance(value, list | tuple):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return str(value.dtype if isinstance(value, torch.Tensor) else torch.float32)[len("torch.") :]


def flops_by_dtype(graph: fx.Graph) -> dict[str, int]:
    """FLOPs of a graph by the dtype whose rate prices them (``Hardware.flops``)."""
    total: dict[str, int] = {}
    for node in graph.nodes:
        if stands_alone(node) and (flops := flops_of(node)):
            dtype = _dtype_of(node.meta["val"])
            total[dtype] = total.get(dtype, 0) + flops
    return total


def annotate(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Put a :class:`Cost` on every node. See the module's docstring."""
    dataflow = Dataflow(gm.graph)
    gm.meta[DATAFLOW] = dataflow
    region = regions(dataflow)
    real = materialized(dataflow, region)
    align = ctx.hardware.allocator_alignment_bytes
    launch_seconds = ctx.hardware.launch_seconds
    rate = ctx.hardware.memory_bytes_per_second
    measured_seconds = ctx.hardware.kernel_seconds
    served = attribution(dataflow)
    phase = ctx.phase.value
    on_cpu = ctx.hardware.device_type == "cpu"
    entered: set[tuple[int, int]] = set()
    size_bytes: list[int] = []  # of one tensor; of several results none
    for index, node in enumerate(dataflow.nodes[:-1]):
        meta, traits, own = node.meta, dataflow.traits[index], region[index]
        meta[PHASE] = phase
        meta[REGION] = None if own == NO_REGION else own
        value = meta.get("val")
        names = served[index]
        own_bytes = 0 if isinstance(value, list | tuple) else bytes_of(value)
        size_bytes.append(own_bytes)
        is_real = real[index]
        memory_bytes = -(-own_bytes // align) * align if is_real else 0
        if traits.collective:
            network, ranks = ctx.network(group_of(node))
            kind, full_bytes = COLLECTIVES[node.target], collective_full_bytes(node)
            staged_bytes = full_bytes if kind in ctx.staged else 0
            what = kind, full_bytes, ranks
            meta[COST] = Cost(
                memory_bytes=0 if node.target is ALL_REDUCE else memory_bytes,
                workspace_bytes=-(-staged_bytes // align) * align,
                seconds=network.collective_seconds(*what),
                busy_seconds=network.busy_seconds(*what),
                wake_seconds=network.wake_seconds(kind, ranks),
                serves=names,
            )
            continue
        if not dataflow.called[index] or traits.alias or traits.marker or traits.getitem:
            in_function = on_cpu and own != NO_REGION
            meta[COST] = _cost(0, 0, 0, memory_bytes, 0.0, names, 0, in_function)
            continue
        read_bytes = _packing_read_bytes(node) if traits.packing else 0
        for source in () if traits.packing else dataflow.inputs[index]:
            if own == NO_REGION:
                read_bytes += size_bytes[source] or bytes_of(dataflow.nodes[source].meta.get("val"))
                continue
            root = dataflow.root[source]
            if region[root] == own or (own, root) in entered:
                continue
            if not _is_tensor(dataflow.nodes[source]):
                continue
            entered.add((own, root))
            # An embedding or a gather reads as much as it gives, not its whole table.
            source_bytes = size_bytes[source] or bytes_of(dataflow.nodes[source].meta["val"])
            read_bytes += min(source_bytes, 4 * max(own_bytes, 1024))
        write_bytes = bytes_of(value) if is_real else 0
        flops, seconds = 0, (read_bytes + write_bytes) / rate
        if traits.stands_alone:
            flops = once_for("flops", node, flops_of)
            seconds = max(flops / ctx.hardware.flops(_dtype_of(value)), seconds)
        if own == NO_REGION or is_real:
            seconds += launch_seconds
        if measured_seconds and traits.stands_alone:
            seconds = measured_seconds.get(once_for("kernel", node, kernel_key), seconds)
        meta[COST] = _cost(
            flops,
            read_bytes,
            write_bytes,
            memory_bytes,
            seconds,
            names,
            workspace_bytes(node) if on_cpu else 0,
            on_cpu and own != NO_REGION,
        )
    return gm


def _is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or several."""
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


@functools.lru_cache(maxsize=1 << 14)
def _cost(
    flops: int,
    read_bytes: int,
    write_bytes: int,
    memory_bytes: int,
    seconds: float,
    names: tuple[str, ...],
    workspace: int,
    in_function: bool,
) -> Cost:
    """The price of what computes: layers that are alike share it, and so do plans."""
    return Cost(
        flops,
        read_bytes,
        write_bytes,
        memory_bytes,
        seconds,
        serves=names,
        workspace_bytes=workspace,
        in_function=in_function,
    )
