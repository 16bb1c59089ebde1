"""Annotate: the cost of every node.

Needs: ``meta["val"]`` on every node.
Leaves: ``COST``, ``PHASE`` and ``REGION`` (None outside fused regions) of every node except the
output; the module's ``DATAFLOW``. The graph is unchanged.

Formulas: a kernel takes its measured time (``kernel_seconds`` of the profile). Without one it takes
the larger of FLOPs / device rate and bytes / memory bandwidth (the roofline). On a CPU
``launch_seconds`` come on top. A GPU computes while the host launches: they are the least time of
its kernels. Learned factors of the profile (``in_force``) correct both. For FLOPs see
``passes/annotate/flops.py``. A collective takes ``latency + wire bytes x inverse bandwidth``, by
the rates and ranks of its process group, and so does a model's own collective. A fused region costs
the bytes that enter and leave it: each node pays for the outside tensors that it reads first in its
region, and for its output in memory. A node without a FLOP formula is priced by its bytes and
logged once at debug level.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import fx

from passes.annotate.collectives import cost_on
from passes.annotate.flops import flops_of
from passes.annotate.fusion_regions import materialized, regions
from passes.annotate.kernel_key import kernel_key
from passes.annotate.realized import NO_REGION
from passes.annotate.workspace import workspace_bytes
from passes.graph.attribution import attribution
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import (
    ALL_REDUCE,
    COLLECTIVES,
    bytes_of,
    group_of,
    is_alias,
    is_collective,
    is_getitem,
    is_marker,
    is_packing,
    once_for,
)
from passes.graph.metadata import COST, DATAFLOW, PHASE, REGION, STORAGE
from passes.graph.op_traits import is_fusible
from passes.ops.model_collectives import kind_and_group, kind_of
from passes.ops.packing import PICKING
from passes.types.annotations import Cost
from passes.types.context import Context


class NoCost(ValueError):
    """An operator has no cost: it was inserted after ``annotate``, or ``annotate`` did not run."""


def cost_of(node: fx.Node) -> Cost:
    """The cost of a node; zero for a graph's output.

    Raises:
        NoCost: for an operator without annotation.
    """
    found: Cost | None = node.meta.get(COST.name)
    if found is not None:
        return found
    if node.op == "call_function":
        raise NoCost(
            f"node {node.name!r} ({node.target}) has no cost: insert operators before the pass "
            "'annotate', or add an 'annotate' of another name after yours"
        )
    return _NOTHING


_NOTHING = Cost()


def region_of(node: fx.Node) -> int | None:
    """The fused region of a node (``passes/annotate/fusion_regions.py``); None: it has none."""
    found: int | None = node.meta.get(REGION.name)
    return found


def collective_full_bytes(node: fx.Node) -> int:
    """Bytes of a collective's whole tensor, over all its ranks."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return max(bytes_of(node.meta["val"]), bytes_of(source.meta["val"]))


def stands_alone(node: fx.Node) -> bool:
    """Whether a node is a kernel of torch's own: no view, not fused, no custom operator."""
    return node.op == "call_function" and not (
        is_fusible(node)
        or is_alias(node)
        or is_marker(node)
        or is_getitem(node)
        or is_collective(node)
        or is_packing(node)
        or kind_of(node.target) is not None
    )


def _packing_read_bytes(node: fx.Node) -> int:
    """Bytes that a packing operator reads; of a bucket only its own columns."""
    sources = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
    read_bytes = sum(bytes_of(s.meta["val"]) for s in sources if isinstance(s, fx.Node))
    if node.target in PICKING:
        return min(read_bytes, bytes_of(node.meta["val"]))
    return read_bytes


def _dtype_of(value: object) -> str:
    """The dtype name of a result, or of the first tensor of several; ``float32`` without one."""
    if isinstance(value, list | tuple):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return str(value.dtype if isinstance(value, torch.Tensor) else torch.float32)[len("torch.") :]


def flops_by_dtype(
    graph: fx.Graph, copies_of: Callable[[fx.Node], int] = lambda node: 1
) -> dict[str, int]:
    """FLOPs of a graph by dtype, whose rate prices them (``Hardware.flops``).

    ``copies_of``: the number of times that a node counts.
    """
    total: dict[str, int] = {}
    for node in graph.nodes:
        if stands_alone(node) and (flops := flops_of(node)):
            dtype = _dtype_of(node.meta["val"])
            total[dtype] = total.get(dtype, 0) + flops * copies_of(node)
    return total


def annotate(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Put a cost on every node. See the module's docstring."""
    dataflow = Dataflow(gm.graph)
    DATAFLOW.set(gm, dataflow)
    region = regions(dataflow)
    on_cpu = ctx.hardware.device_type == "cpu"
    real = materialized(dataflow, region, on_cpu)
    align = ctx.hardware.allocator_alignment_bytes
    launch_seconds = ctx.hardware.launch_seconds
    rate = ctx.hardware.memory_bytes_per_second
    measured_seconds, learned = ctx.hardware.kernel_seconds, ctx.hardware.in_force
    served = attribution(dataflow)
    phase = ctx.phase.value
    reads = _Reads(dataflow, region)
    for index, node in enumerate(dataflow.nodes[:-1]):
        meta, traits, own = node.meta, dataflow.traits[index], region[index]
        meta[PHASE.name] = phase
        meta[REGION.name] = None if own == NO_REGION else own
        names = served[index]
        is_real = real[index]
        storage = meta.get(STORAGE.name)
        size_bytes = storage.size_bytes if storage else reads.size_bytes[index]
        memory_bytes = -(-size_bytes // align) * align if is_real else 0
        if traits.collective:
            meta[COST.name] = _collective_cost(node, memory_bytes, names, ctx)
            continue
        in_function = on_cpu and own != NO_REGION
        if not dataflow.called[index] or traits.alias or traits.marker or traits.getitem:
            meta[COST.name] = _cost(0, 0, 0, memory_bytes, 0.0, names, 0, in_function)
            continue
        value = meta.get("val")
        read_bytes = _packing_read_bytes(node) if traits.packing else reads.by_kernel(index)
        write_bytes = bytes_of(value) if is_real else 0
        if traits.model_collective:
            meta[COST.name] = _model_collective_cost(node, memory_bytes, names, ctx)
            continue
        flops, seconds = 0, (read_bytes + write_bytes) / rate
        if traits.stands_alone:
            flops = once_for("flops", node, flops_of)
            seconds = max(flops / ctx.hardware.flops(_dtype_of(value)), seconds)
        if own == NO_REGION or is_real:
            seconds = seconds + launch_seconds if on_cpu else max(seconds, launch_seconds)
        workspace = workspace_bytes(node) if on_cpu else 0
        if traits.stands_alone and (measured_seconds or ctx.workspaces):
            key = once_for("kernel", node, kernel_key)
            seconds = measured_seconds.get(key, seconds)
            workspace = ctx.workspaces.get(key, workspace)
        seconds *= learned.kernel_factor if traits.stands_alone else learned.fused_factor
        meta[COST.name] = _cost(
            flops,
            read_bytes,
            write_bytes,
            memory_bytes,
            seconds,
            names,
            workspace,
            in_function,
        )
    return gm


class _Reads:
    """Bytes that each kernel reads.

    A region reads each outside tensor once: its first node in graph order pays.
    ``size_bytes``: by node, the bytes of a single tensor; 0 for several results.
    """

    def __init__(self, dataflow: Dataflow, region: list[int]) -> None:
        self._dataflow, self._region = dataflow, region
        self._entered: set[tuple[int, int]] = set()  # a region, and a tensor that it has read
        self._values = [node.meta.get("val") for node in dataflow.nodes]
        self.size_bytes = [
            0 if isinstance(value, list | tuple) else bytes_of(value) for value in self._values
        ]

    def by_kernel(self, index: int) -> int:
        """Bytes that the kernel of a node reads for this node."""
        region, values, size_bytes = self._region, self._values, self.size_bytes
        own, read_bytes = region[index], 0
        for source in self._dataflow.inputs[index]:
            if own == NO_REGION:
                read_bytes += size_bytes[source] or bytes_of(values[source])
                continue
            root = self._dataflow.root[source]
            if region[root] == own or (own, root) in self._entered:
                continue
            if isinstance(values[source], torch.Tensor | list | tuple):
                self._entered.add((own, root))
                # The cap is for an embedding or a gather, which reads only a part of its table.
                source_bytes = size_bytes[source] or bytes_of(values[source])
                read_bytes += min(source_bytes, 4 * max(size_bytes[index], 1024))
        return read_bytes


def _collective_cost(
    node: fx.Node, memory_bytes: int, names: tuple[str, ...], ctx: Context
) -> Cost:
    """The cost of a collective; ``memory_bytes``: of a result that is a buffer of its own."""
    kind, full_bytes = COLLECTIVES[node.target], collective_full_bytes(node)
    align = ctx.hardware.allocator_alignment_bytes
    staged_bytes = full_bytes if kind in ctx.staged else 0
    cost = cost_on(kind, full_bytes, ctx, group_of(node))
    return Cost(
        memory_bytes=0 if node.target is ALL_REDUCE else memory_bytes,
        workspace_bytes=-(-staged_bytes // align) * align,
        seconds=cost.seconds,
        compute_overhead_seconds=cost.overhead_seconds,
        start_delay_seconds=cost.start_delay_seconds,
        lateness=cost.lateness,
        serves=names,
    )


def _model_collective_cost(
    node: fx.Node, memory_bytes: int, names: tuple[str, ...], ctx: Context
) -> Cost:
    """The cost of a model's own collective. It delays no compute: compute waits for it."""
    kind, group_name = kind_and_group(node)
    if ctx.uses_p2p and kind == "reduce_scatter":  # an exchange and a local sum
        kind = "all_to_all"
    cost = cost_on(kind, collective_full_bytes(node), ctx, group_name)
    return Cost(
        memory_bytes=memory_bytes,
        seconds=cost.seconds,
        lateness=cost.lateness,
        serves=names,
        beside=ctx.beside(group_name),
    )


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
    """The cost of a node other than a collective, shared by equal layers and by plans."""
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
