"""Hierarchical: replace a collective over a mesh of hosts by stages, where that is faster.

Needs: collectives with their wait directly after the start (after ``bucket``, if that runs).
Leaves: the same. A hierarchical collective is one collective per stage, along one dimension of the
mesh (``ctx.mesh_dims``) and on the process group of that dimension. The stages have the same
``COLLECTIVE`` except for ``stage``, the index of the stage.

With N ranks = H hosts of G ranks, and k elements on each rank (``exchange``: an all-to-all; a
reduce-scatter may take the place of an exchange with its mean or sum)::

    w = wait(gather(p, N))       a = wait(gather(p, H between hosts))         [H * k]
                                 b = wait(gather(a, G within the host))       [G * H * k]
                                 w = unpack(b, rows back in the ranks' order)

    m = mean(exchange(t, N))     t' = the rows of t by the place within a host
                                 a = mean(exchange(t', G within the host))    [H * k]
                                 m = mean(exchange(a, H between hosts))       [k]

    r = wait(all_reduce(t))      a = sum(exchange(t, G within the host))      [n / G]
                                 b = wait(all_reduce(a, H between hosts))     [n / G]
                                 r = wait(gather(b, G within the host))       [n]

So each byte crosses the network between hosts once per host and not once per rank. An all-reduce
is padded if G does not divide its n elements. Its result is copied once more if it was padded, or
if collectives are P2P (``ctx.uses_p2p``).

The choice depends on sizes without a batch dimension and on the profile, so all ranks agree. Like
buckets, it is decided once and is part of the plan's order. The choice counts the seconds of the
copies and of the starts. It does not count memory: the stages hold intermediate results.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from passes.annotate.annotate_costs import collective_full_bytes
from passes.annotate.collectives import cost_on, costs_in_stages
from passes.graph.fx_utils import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    WAIT,
    call,
    group_of,
    numel_of,
    remove_dead,
    root_of,
)
from passes.graph.metadata import COLLECTIVE, GRADIENT_OF
from passes.ops.p2p import EXCHANGE, GATHER_PARTS
from passes.ops.packing import FIRST_OF, MEAN_RANKS, PACK_COLUMNS, SUM_RANKS, UNPACK
from passes.shard.lower_markers import after_wait, flat, reduce_rows, start_collective
from passes.types.context import Context, MeshDim
from passes.types.plan import Collective

_VIEW = torch.ops.aten.view.default


def hierarchical(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Replace collectives by hierarchical stages. See the module's docstring."""
    if ctx.mesh_dims is None:
        return gm
    graph = gm.graph
    starts = [node for node in graph.nodes if COLLECTIVE.is_set(node)]
    planned = ctx.plan.order_for(ctx.phase.value, [COLLECTIVE.of(node) for node in starts])
    later = None if planned is None else {one.first for one in planned if one.stage}
    for start in starts:
        # Activations go flat; other groups: the parameter is sharded within hosts.
        if COLLECTIVE.of(start).tokens or group_of(start) != ctx.group_name:
            continue
        chosen = _pays(start, ctx) if later is None else COLLECTIVE.of(start) in later
        if not chosen:
            continue
        if COLLECTIVE.of(start).gathers:
            _gather_in_stages(start, *ctx.mesh_dims, ctx)
        elif start.target is ALL_REDUCE:
            _all_reduce_in_stages(start, *ctx.mesh_dims, ctx)
        else:
            _scatter_in_stages(start, *ctx.mesh_dims, ctx)
    remove_dead(graph)
    return gm


def _pays(start: fx.Node, ctx: Context) -> bool:
    """Whether the stages and their copies take less time than the flat collective.

    The compute overhead counts on both sides: every stage has its own start.
    """
    kind, full_bytes = COLLECTIVES[start.target], collective_full_bytes(start)
    flat_seconds = cost_on(kind, full_bytes, ctx).total_seconds
    stages = costs_in_stages(kind, full_bytes, ctx)
    copied = _copied_bytes(start, full_bytes, ctx) / ctx.hardware.memory_bytes_per_second
    return sum(cost.total_seconds for cost in stages) + copied < flat_seconds


def _copied_bytes(start: fx.Node, full_bytes: int, ctx: Context) -> int:
    """Bytes that the stages' copies read and write, in addition to the flat collective's copies."""
    assert ctx.mesh_dims is not None
    _, inner = ctx.mesh_dims
    if COLLECTIVE.of(start).gathers:
        unpacked = all(user.target is UNPACK for user in _wait_of(start).users)
        return 0 if unpacked else 2 * full_bytes
    if start.target is ALL_REDUCE:
        padded = numel_of(start.meta["val"]) % inner.size != 0
        joined = 2 * full_bytes if padded or ctx.uses_p2p else 0
        summed = full_bytes + full_bytes // inner.size if ctx.uses_p2p else 0
        return (2 * full_bytes if padded else 0) + summed + joined
    packed = 0 if _table(start).target is PACK_COLUMNS else 2 * full_bytes
    return packed + (0 if start.target is REDUCE_SCATTER else 2 * full_bytes // inner.size)


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    assert wait.target is WAIT
    return wait


def _table(start: fx.Node) -> fx.Node:
    """The tensor that a collective sends."""
    (source, *_) = start.args
    assert isinstance(source, fx.Node)
    return source


def _gather_in_stages(start: fx.Node, outer: MeshDim, inner: MeshDim, ctx: Context) -> None:
    graph, purpose, wait = start.graph, COLLECTIVE.of(start), _wait_of(start)
    packed = _table(start)
    with graph.inserting_before(start):
        args = (packed, outer.size, outer.group_name)
        first = start_collective(graph, start.target, args, purpose)
        part = call(graph, WAIT, (first,), "gathered")
        args = (part, inner.size, inner.group_name)
        second = start_collective(graph, start.target, args, _stage(purpose, 1))
        whole = call(graph, WAIT, (second,), "gathered")
    if ctx.uses_p2p and root_of(packed).op != "placeholder":
        second.kwargs = {"sent": packed}
    alive = part if ctx.uses_p2p else None
    for user in list(wait.users):
        if user.target is UNPACK:
            _, ranks, column, shape, *others = user.args
            user.args = (whole, ranks, column, shape, alive, inner.size, *others[2:])
    if wait.users:
        rows = (ctx.world_size, 0, [numel_of(wait.meta["val"])])
        with graph.inserting_before(wait):
            joined = after_wait(call(graph, UNPACK, (whole, *rows, alive, inner.size)))
        wait.replace_all_uses_with(joined)
    graph.erase_node(wait)
    graph.erase_node(start)


def _scatter_in_stages(start: fx.Node, outer: MeshDim, inner: MeshDim, ctx: Context) -> None:
    graph, purpose = start.graph, COLLECTIVE.of(start)
    table = _table(start)
    packed = table.target is PACK_COLUMNS
    tensors, hosts = (table.args[0], table.args[3:]) if packed else ([table], ())
    with graph.inserting_before(start):
        args = (tensors, ctx.world_size, inner.size, *hosts)
        rows = call(graph, PACK_COLUMNS, args, "bucket")
        for stage, dim in enumerate((inner, outer)):
            network = (dim.size, dim.group_name)
            rows = reduce_rows(graph, start.target, rows, *network, _stage(purpose, stage))
    _replace(start, rows)


def _all_reduce_in_stages(start: fx.Node, outer: MeshDim, inner: MeshDim, ctx: Context) -> None:
    graph, purpose = start.graph, COLLECTIVE.of(start)
    value = start.meta["val"]
    numel, padded = numel_of(value), numel_of(value) % inner.size != 0
    scatter, gather = (EXCHANGE, GATHER_PARTS) if ctx.uses_p2p else (REDUCE_SCATTER, ALL_GATHER)
    within = (inner.size, inner.group_name)
    with graph.inserting_before(start):
        rows = _table(start) if value.dim() == 1 else flat(graph, _table(start))
        if padded:
            rows = call(graph, PACK_COLUMNS, ([rows], inner.size), "bucket")
        part = reduce_rows(graph, scatter, rows, *within, purpose, SUM_RANKS)
        args = (part, *start.args[1:-1], outer.group_name)
        between = start_collective(graph, ALL_REDUCE, args, _stage(purpose, 1))
        part = call(graph, WAIT, (between,), "reduced")
        join = start_collective(graph, gather, (part, *within), _stage(purpose, 2))
        whole = call(graph, WAIT, (join,), "reduced")
        if padded or ctx.uses_p2p:
            sent = (part,) if ctx.uses_p2p else ()
            whole = after_wait(call(graph, FIRST_OF, (whole, numel, *sent)))
        if value.dim() != 1:
            whole = after_wait(call(graph, _VIEW, (whole, list(value.shape))))
    _replace(start, whole)


def _stage(purpose: Collective, stage: int) -> Collective:
    return dataclasses.replace(purpose, stage=stage)


def _replace(start: fx.Node, by: fx.Node) -> None:
    """Replace the result of a flat collective (its wait, or the mean after it) by ``by``."""
    wait = _wait_of(start)
    result = wait
    if start.target in (EXCHANGE, ALL_TO_ALL):
        (result,) = wait.users
        assert result.target is MEAN_RANKS
    result.replace_all_uses_with(by)
    GRADIENT_OF.copy(result, by)
    for node in dict.fromkeys((result, wait, start)):
        start.graph.erase_node(node)
