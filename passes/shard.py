"""Shard: markers become functional collectives.

Needs: a forward, backward or inference graph with markers.
Leaves: no markers; each collective is started and waited for on the spot, one a
parameter, with ``meta["collective"]`` (:class:`Collective`) on the node that starts it.

Before::                              After (sharded, N ranks)::

    w = unshard(p, [rows, k])             start = all_gather(p, N); w = wait(start)
    r = reduce_grad(g, p)                 m = g * (1/N); start = all_to_all(m)
                                          r = wait(start).view(N, rows/N, k).sum(0)

A replicated parameter's unshard disappears, and its gradient is all-reduced. Where N does
not divide the rows, shards are padded to equal size before and trimmed after. A gradient
is reduced by ``reduce_scatter`` or by ``all_to_all`` and a sum on the spot, whichever the
hardware profile says is faster (gloo runs a reduce-scatter as a whole all-reduce).

On gloo (``ctx.by_exchange``) gathers too are exchanges: its all-gather and reduce-scatter
make views and copies of the tensors on gloo's own threads, which corrupts the heap when
several are in flight beside compiled code (docs/design.md); its all-to-all touches bytes only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from passes.context import Context
from passes.graph import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    bytes_of,
    call,
    compact,
    output_node,
)
from passes.markers import PAD_ROWS, REDUCE_GRAD, TRIM_ROWS, UNSHARD

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a collective is for: the parameters it serves, and whether it gathers or reduces."""

    names: tuple[str, ...]
    gathers: bool

    @property
    def label(self) -> str:
        return f"{'gather' if self.gathers else 'reduce'} {'+'.join(self.names)}"


def shard(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Lower every marker. See the module's docstring."""
    graph = gm.graph
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        _lower_unshard(node, ctx)
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        _lower_reduce(node, ctx)
    return gm


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _lower_unshard(node: fx.Node, ctx: Context) -> None:
    graph = node.graph
    source, name, shape, sharded, group = node.args
    assert isinstance(source, fx.Node) and isinstance(name, str)
    if not sharded:
        if node in output_node(graph).all_input_nodes:
            with graph.inserting_before(node):
                source = call(graph, _aten.clone.default, (source,))
        _replace(node, source)
        return
    total = int(shape[0])  # type: ignore[index,arg-type]
    rows = -(-total // ctx.world_size)
    with graph.inserting_before(node):
        if rows * ctx.world_size != total:
            source = call(graph, PAD_ROWS, (source, rows))
        full = gather(graph, source, group, Collective((name,), gathers=True), ctx)
        if rows * ctx.world_size != total:
            full = unpack(call(graph, _aten.slice.Tensor, (full, 0, 0, total)))
    _replace(node, full)


def gather(
    graph: fx.Graph, source: fx.Node, group: Any, purpose: Collective, ctx: Context
) -> fx.Node:
    """Gather every rank's tensor along the first dimension; returns the wait.

    By an exchange (``ctx.by_exchange``) each rank sends a copy of its part to every other:
    the same bytes on the wire, and a whole tensor's worth of copies in memory.
    """
    if not ctx.by_exchange:
        args = (source, ctx.world_size, group)
        return call(graph, WAIT, (start_collective(graph, ALL_GATHER, args, purpose),), "gathered")
    shape = list(source.meta["val"].shape)
    one = call(graph, _aten.unsqueeze.default, (source, 0))
    each = compact(graph, call(graph, _aten.expand.default, (one, [ctx.world_size, *shape])))
    copies = call(graph, _aten.view.default, (each, [ctx.world_size * shape[0], *shape[1:]]))
    splits = [shape[0]] * ctx.world_size
    start = start_collective(graph, ALL_TO_ALL, (copies, splits, splits, group), purpose)
    return call(graph, WAIT, (start,), "gathered")


def unpack(node: fx.Node) -> fx.Node:
    """Mark a node as part of what a collective's output goes through: it follows the wait."""
    node.meta["unpacks"] = True
    return node


def start_collective(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], purpose: Collective
) -> fx.Node:
    """A collective's starting node, labelled with what it is for."""
    node = call(graph, target, args, "gather" if purpose.gathers else "reduce")
    node.meta["collective"] = purpose
    return node


def _lower_reduce(node: fx.Node, ctx: Context) -> None:
    graph = node.graph
    gradient, like, name, sharded, group = node.args
    assert isinstance(gradient, fx.Node) and isinstance(like, fx.Node) and isinstance(name, str)
    world_size = ctx.world_size
    purpose = Collective((name,), gathers=False)
    with graph.inserting_before(node):
        mean = call(graph, _aten.mul.Tensor, (gradient, 1.0 / world_size))
        if not mean.meta["val"].is_contiguous():
            mean = compact(graph, mean)
        if not sharded:
            start = start_collective(graph, ALL_REDUCE, (mean, "sum", group), purpose)
            _finish(node, call(graph, WAIT, (start,), "reduced"))
            return
        total = gradient.meta["val"].shape[0]
        rows = -(-total // world_size)
        if rows * world_size != total:
            padding = [0, 0] * (gradient.meta["val"].dim() - 1) + [0, rows * world_size - total]
            mean = call(graph, _aten.constant_pad_nd.default, (mean, padding))
        if by_all_to_all(bytes_of(mean.meta["val"]), ctx):
            splits = [rows] * world_size
            start = start_collective(graph, ALL_TO_ALL, (mean, splits, splits, group), purpose)
            parts = call(graph, WAIT, (start,), "exchanged")
            shape = [world_size, rows, *mean.meta["val"].shape[1:]]
            stacked = unpack(call(graph, _aten.view.default, (parts, shape)))
            part = unpack(call(graph, _aten.sum.dim_IntList, (stacked, [0]), "reduced"))
        else:
            start = start_collective(
                graph, REDUCE_SCATTER, (mean, "sum", world_size, group), purpose
            )
            part = call(graph, WAIT, (start,), "reduced")
        if rows * world_size != total:
            part = unpack(call(graph, TRIM_ROWS, (part, like)))
    _finish(node, part)


def _finish(node: fx.Node, by: fx.Node) -> None:
    by.meta["gradient_of"] = node.args[2]
    _replace(node, by)


def by_all_to_all(full_bytes: int, ctx: Context) -> bool:
    """Whether an all-to-all and a local sum reduce a gradient faster than a reduce-scatter."""
    if ctx.by_exchange:
        return True
    hardware = ctx.hardware
    scatter = hardware.collective_seconds("reduce_scatter", full_bytes, ctx.world_size)
    exchange = hardware.collective_seconds("all_to_all", full_bytes, ctx.world_size)
    local_sum = full_bytes * (1 + 1 / ctx.world_size) / hardware.memory_bytes_per_second
    return exchange + local_sum < scatter
