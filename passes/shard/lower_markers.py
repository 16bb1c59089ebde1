"""Shard: lower markers to functional collectives.

Needs: a forward, backward or inference graph with markers.
Leaves: no markers. Each parameter has its own collectives, and each wait directly follows its
start. The start has ``meta["collective"]`` (a :class:`~passes.types.plan.Collective`).

Before::                              After (sharded, N ranks)::

    w = unshard(p, [rows, k])             start = all_gather(p.view(-1), N)
                                          w = wait(start).view(rows, k)
    r = reduce_grad(g, p)                 start = all_to_all(g.view(-1))
                                          r = mean_ranks(wait(start), N).view(rows/N, k)

A replicated parameter's unshard disappears, and its gradient is all-reduced, unless there is one
rank. If N does not divide
the rows, shards are padded to equal size before a collective and trimmed after it. A gradient is
reduced by ``reduce_scatter`` or by ``all_to_all`` and a local mean, by the shorter time in the
hardware profile (gloo runs a reduce-scatter as a whole all-reduce).

A parameter sharded within hosts is gathered and reduced on the mesh's inner group. Its reduced
shard is then all-reduced between hosts, the second stage of the reduction.

A parameter that is sharded along another dimension than the first (its activations move, but not in
this graph) is turned before the gather and after it, and so is its gradient.

A shard is cast to the parameter's read dtype before the gather. A gradient is cast to its travel
dtype before the reduction, and to its parameter's dtype after it.

On gloo (``ctx.uses_p2p``), gathers and reductions use P2P collectives (``passes/ops/p2p.py``):
they are faster than gloo's own, and safe (docs/lowering.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.annotate.collectives import by_all_to_all
from passes.graph.fx_utils import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CAST,
    REDUCE_SCATTER,
    WAIT,
    bytes_of,
    call,
    compact,
    numel_of,
    output_node,
    root_of,
)
from passes.graph.metadata import AFTER_WAIT, COLLECTIVE, GRADIENT_OF
from passes.ops.markers import (
    REDUCE_GRAD,
    UNSHARD,
    reduce_grad_of,
    set_args,
    unshard_of,
    unshards,
)
from passes.ops.p2p import EXCHANGE, GATHER_PARTS
from passes.ops.packing import MEAN_RANKS, PACK, PACK_COLUMNS, PAD_ROWS, TRIM_ROWS, UNPACK
from passes.types.context import Context
from passes.types.plan import Collective
from passes.types.shard_layout import ShardLayout

_aten = torch.ops.aten


def shard(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Lower every marker. See the module's docstring."""
    graph = gm.graph
    _turn(graph)
    for node in unshards(graph):
        _lower_unshard(node, ctx)
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        _lower_reduce(node, ctx)
    return gm


def _turn(graph: fx.Graph) -> None:
    """Make the sharded dimension of every marker the first one."""
    for node in unshards(graph):
        marker = unshard_of(node)
        if not marker.dim:
            continue
        with graph.inserting_before(node):
            rows = _outermost(graph, marker.shard, marker.dim)
            whole = node.meta["val"].movedim(marker.dim, 0).contiguous()
            turned = graph.call_function(UNSHARD, kwargs=dict(node.kwargs))
            turned.meta["val"] = whole
            set_args(turned, marker._replace(shard=rows, shape=list(whole.shape), dim=0))
            _replace(node, _back_in_place(graph, turned, marker.dim))
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        mark = reduce_grad_of(node)
        if not mark.dim:
            continue
        with graph.inserting_before(node):
            gradient = _outermost(graph, mark.gradient, mark.dim)
            rows = _outermost(graph, mark.shard, mark.dim)
            turned = graph.call_function(REDUCE_GRAD, kwargs=dict(node.kwargs))
            turned.meta["val"] = rows.meta["val"].contiguous()
            set_args(turned, mark._replace(gradient=gradient, shard=rows, dim=0))
            part = _back_in_place(graph, turned, mark.dim)
        GRADIENT_OF.set(part, mark.name)
        _replace(node, part)


def _outermost(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    """A contiguous copy of a tensor with a dimension moved to the first place."""
    others = [one for one in range(node.meta["val"].dim()) if one != dim]
    return compact(graph, call(graph, _aten.permute.default, (node, [dim, *others])))


def _back_in_place(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    """A contiguous copy of a tensor with its first dimension moved to a place."""
    dims = list(range(1, node.meta["val"].dim()))
    dims.insert(dim, 0)
    return compact(graph, call(graph, _aten.permute.default, (node, dims)))


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _lower_unshard(node: fx.Node, ctx: Context) -> None:
    graph = node.graph
    source, name, shape, sharded, group, *_ = unshard_of(node)
    if not sharded:
        with graph.inserting_before(node):
            value = cast(graph, source, node.meta["val"].dtype)
            if value is source and node in output_node(graph).all_input_nodes:
                value = call(graph, _aten.clone.default, (source,))
        _replace(node, value)
        return
    with graph.inserting_before(node):
        source = cast(graph, source, node.meta["val"].dtype)
    total = int(shape[0])
    cut = ctx.cut_by(group)
    rows = cut.most_rows(total)
    padded = rows * cut.ranks != total
    with graph.inserting_before(node):
        if padded:
            source = call(graph, PAD_ROWS, (source, rows))
        wait, sent = gather(graph, [source], group, Collective((name,), gathers=True), ctx)
        inner = list(source.meta["val"].shape[1:])
        if sent is not None or (padded and cut.hosts > 1):
            full = unpack(graph, wait, 0, [total, *inner], sent, cut)
        else:
            whole = [rows * cut.ranks, *inner]
            full = after_wait(call(graph, _aten.view.default, (wait, whole)))
            if padded:
                full = after_wait(call(graph, _aten.slice.Tensor, (full, 0, 0, total)))
    _replace(node, full)


def gather(
    graph: fx.Graph, parts: Sequence[fx.Node], group: Any, purpose: Collective, ctx: Context
) -> tuple[fx.Node, fx.Node | None]:
    """Gather the parts of all ranks of a group; the parts of one rank are packed flat.

    Returns the wait, and the ``sent`` argument of the operator after the wait (None: not needed).
    """
    single = len(parts) == 1
    packed = flat(graph, parts[0]) if single else call(graph, PACK, (list(parts),), "bucket")
    target = GATHER_PARTS if ctx.uses_p2p else ALL_GATHER
    start = start_collective(graph, target, (packed, ctx.cut_by(group).ranks, group), purpose)
    needed = ctx.uses_p2p and root_of(packed).op != "placeholder"
    return call(graph, WAIT, (start,), "gathered"), packed if needed else None


def unpack(
    graph: fx.Graph,
    gathered: fx.Node,
    start: int,
    shape: Sequence[int],
    sent: fx.Node | None,
    cut: ShardLayout,
) -> fx.Node:
    """A full tensor from the columns of ``gathered`` at ``start``; ``sent``: see :func:`gather`."""
    args: tuple[Any, ...] = (gathered, cut.ranks, start, list(shape))
    if cut.hosts > 1:
        args += (sent, 1, cut.hosts)
    elif sent is not None:
        args += (sent,)
    return after_wait(call(graph, UNPACK, args))


def cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A tensor cast to a dtype, or itself if it has this dtype."""
    if node.meta["val"].dtype == dtype:
        return node
    return call(graph, CAST, (node, dtype))


def cast_after_wait(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A collective's result cast to a dtype; the cast moves with the wait."""
    made = cast(graph, node, dtype)
    return made if made is node else after_wait(made)


def flat(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A one-dimensional view of a contiguous tensor."""
    return call(graph, _aten.view.default, (node, [-1]))


def after_wait(node: fx.Node) -> fx.Node:
    """Mark a node that processes a collective's output, so that it moves with the wait."""
    AFTER_WAIT.set(node, True)
    return node


def start_collective(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], purpose: Collective
) -> fx.Node:
    """A collective's start node, labelled with its purpose."""
    node = call(graph, target, args, "gather" if purpose.gathers else "reduce")
    COLLECTIVE.set(node, purpose)
    return node


def _lower_reduce(node: fx.Node, ctx: Context) -> None:
    graph = node.graph
    gradient, like, name, sharded, group, *_ = reduce_grad_of(node)
    purpose = Collective((name,), gathers=False)
    if gradient.op == "call_function" and like.op == "placeholder":
        # Autograd's position of the marker differs between a traced model and the planner's
        # capture. One position for both gives equal buckets, so the plan's order applies.
        gradient.append(node)
    dtype = node.kwargs.get("reduce_dtype")
    own_dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        if ctx.world_size == 1:
            _finish(node, _own_gradient(graph, cast(graph, gradient, own_dtype), like))
            return
        if isinstance(dtype, torch.dtype):
            gradient = cast(graph, gradient, dtype)
        if not sharded:
            mean = mean_before(graph, gradient, ctx)
            reduced = all_reduced(graph, mean, group, purpose)
            _finish(node, cast_after_wait(graph, reduced, own_dtype))
            return
        shape = list(gradient.meta["val"].shape)
        cut = ctx.cut_by(group)
        rows = cut.most_rows(shape[0])
        part = scatter(graph, [gradient], group, purpose, ctx)
        part = after_wait(call(graph, _aten.view.default, (part, [rows, *shape[1:]])))
        if rows * cut.ranks != shape[0]:
            part = after_wait(call(graph, TRIM_ROWS, (part, like)))
        part = cast_after_wait(graph, part, own_dtype)
    _finish(node, part)


def _own_gradient(graph: fx.Graph, gradient: fx.Node, like: fx.Node) -> fx.Node:
    """The gradient of one rank's parameter, in memory of its own and with the parameter's strides.

    Autograd would copy any other gradient, outside of the graph.
    """
    own, other = gradient.meta["val"], like.meta["val"]
    if own.stride() != other.stride() and not own.is_contiguous():
        return compact(graph, gradient)
    if gradient.op == "placeholder" or GRADIENT_OF.is_set(gradient):
        return call(graph, _aten.clone.default, (gradient,))
    return gradient


def mean_before(graph: fx.Graph, gradient: fx.Node, ctx: Context) -> fx.Node:
    """This rank's contiguous share of the mean: division comes before the sum, as in DDP."""
    mean = call(graph, _aten.mul.Tensor, (gradient, 1.0 / ctx.world_size))
    return mean if mean.meta["val"].is_contiguous() else compact(graph, mean)


def scatter(
    graph: fx.Graph, gradients: Sequence[fx.Node], group: Any, purpose: Collective, ctx: Context
) -> fx.Node:
    """Average full gradients over all ranks; returns this rank's parts, packed flat.

    ``group``: process group of the ranks that share the rows.
    """
    cut = ctx.cut_by(group)
    exchange = by_all_to_all(sum(bytes_of(g.meta["val"]) for g in gradients), group, ctx)
    if not exchange:
        gradients = [mean_before(graph, gradient, ctx) for gradient in gradients]
    value = gradients[0].meta["val"]
    if len(gradients) == 1 and value.is_contiguous() and value.shape[0] % cut.ranks == 0:
        packed = flat(graph, gradients[0])
    else:
        args = (list(gradients), cut.ranks, *((1, cut.hosts) if cut.hosts > 1 else ()))
        packed = call(graph, PACK_COLUMNS, args, "bucket")
    target = REDUCE_SCATTER
    if exchange:
        target = EXCHANGE if ctx.uses_p2p else ALL_TO_ALL
    part = reduce_rows(graph, target, packed, cut.ranks, group, purpose, copies=cut.copies)
    if not cut.between:
        return part
    second = dataclasses.replace(purpose, stage=1)
    return all_reduced(graph, part, cut.between, second)


def all_reduced(graph: fx.Graph, part: fx.Node, group: str, purpose: Collective) -> fx.Node:
    """The wait of an all-reduce that adds up a tensor over a group, and its start before it."""
    start = start_collective(graph, ALL_REDUCE, (part, "sum", group), purpose)
    return call(graph, WAIT, (start,), "reduced")


def reduce_rows(
    graph: fx.Graph,
    target: Any,
    packed: fx.Node,
    ranks: int,
    group: Any,
    purpose: Collective,
    combine: Any = MEAN_RANKS,
    copies: int = 1,
) -> fx.Node:
    """Reduce a flat table with one row per rank of a group; returns this rank's row.

    A reduce-scatter sums the rows. After an all-to-all, the operator ``combine`` reduces them.
    ``copies``: number of such means that are summed later; the mean is divided by it.
    """
    if target is REDUCE_SCATTER:
        start = start_collective(graph, target, (packed, "sum", ranks, group), purpose)
        return call(graph, WAIT, (start,), "reduced")
    if target is EXCHANGE:
        start = start_collective(graph, target, (packed, ranks, group), purpose)
    else:
        splits = [numel_of(packed.meta["val"]) // ranks] * ranks
        start = start_collective(graph, target, (packed, splits, splits, group), purpose)
    parts = call(graph, WAIT, (start,), "exchanged")
    args: tuple[Any, ...] = (parts, ranks, *((packed,) if target is EXCHANGE else ()))
    if copies > 1:
        args = (parts, ranks, packed if target is EXCHANGE else None, copies)
    return after_wait(call(graph, combine, args, "reduced"))


def _finish(node: fx.Node, by: fx.Node) -> None:
    GRADIENT_OF.set(by, reduce_grad_of(node).name)
    _replace(node, by)
