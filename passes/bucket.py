"""Bucket: small collectives travel together.

Needs: collectives started and waited for on the spot (after ``shard``).
Leaves: collectives of ``plan.bucket_bytes`` or more alone and without a copy; smaller
ones of one kind, dtype and group packed into flat buckets of up to that size, gathers in
the order of their first use, reductions in the order their gradients are ready.

Before::                                   After::

    a = wait(all_gather(p, N))                 f = cat([p.view(-1), q.view(-1)])
    b = wait(all_gather(q, N))                 w = wait(all_gather(f, N)).view(N, -1)
                                               a = w[:, :n].reshape(...); b = w[:, n:]...

The packing depends on the plan and the parameters' sizes only, never on batch sizes, so
that ranks with different batches still agree. Gradients come out of an all-reduce's
bucket as views of it: nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.annotate import collective_full_bytes
from passes.context import Context
from passes.graph import (
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    call,
    compact,
    last_of,
    numel_of,
    positions,
)
from passes.shard import Collective, gather, start_collective, unpack

_aten = torch.ops.aten


def bucket(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Pack small collectives. See the module's docstring."""
    graph = gm.graph
    for members in _buckets(graph, ctx.plan.bucket_bytes):
        if members[0].meta["collective"].gathers:
            _pack_gathers(graph, members, ctx)
        elif members[0].target is ALL_REDUCE:
            _pack_all_reduces(graph, members)
        else:
            _pack_scatters(graph, members, ctx)
    graph.eliminate_dead_code()
    return gm


def _buckets(graph: fx.Graph, limit_bytes: int) -> list[list[fx.Node]]:
    """Collectives to pack together: lists of two or more, in the order of the graph."""
    open_buckets: dict[tuple[object, ...], list[fx.Node]] = {}
    filled: dict[tuple[object, ...], int] = {}
    done: list[list[fx.Node]] = []
    for node in graph.nodes:
        if "collective" not in node.meta:
            continue
        size_bytes = collective_full_bytes(node)
        if size_bytes >= limit_bytes:
            continue
        key = (node.target, node.meta["collective"].gathers, node.meta["val"].dtype)
        if key in open_buckets and filled[key] + size_bytes > limit_bytes:
            done.append(open_buckets.pop(key))
        if key not in open_buckets:
            open_buckets[key], filled[key] = [], 0
        open_buckets[key].append(node)
        filled[key] += size_bytes
    done.extend(open_buckets.values())
    return [members for members in done if len(members) > 1]


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    assert wait.target is WAIT
    return wait


def _purpose(members: Sequence[fx.Node]) -> Collective:
    names = tuple(name for node in members for name in node.meta["collective"].names)
    return Collective(names, gathers=members[0].meta["collective"].gathers)


def _flat(graph: fx.Graph, node: fx.Node, shape: list[int]) -> fx.Node:
    return call(graph, _aten.view.default, (node, shape))


def _drop(graph: fx.Graph, wait: fx.Node, by: fx.Node) -> None:
    wait.replace_all_uses_with(by)
    start = wait.args[0]
    if "gradient_of" in wait.meta:
        by.meta["gradient_of"] = wait.meta["gradient_of"]
    graph.erase_node(wait)
    graph.erase_node(start)  # type: ignore[arg-type]


def _part(start: fx.Node) -> fx.Node:
    """This rank's part of what a gather gathers: its input, before it is copied for an exchange."""
    source: Any = start.args[0]
    if start.target is ALL_TO_ALL:
        for _ in range(4):  # view, clone, expand, unsqueeze: see passes.shard.gather
            source = source.args[0]
    assert isinstance(source, fx.Node)
    return source


def _move_inputs_before(node: fx.Node, anchor: fx.Node, order: dict[fx.Node, int]) -> None:
    """Bring a gather's input chain (a pad of a placeholder) before the anchor."""
    if node.op == "call_function" and order[node] > order[anchor]:
        for source in node.all_input_nodes:
            _move_inputs_before(source, anchor, order)
        anchor.prepend(node)


def _pack_gathers(graph: fx.Graph, members: list[fx.Node], ctx: Context) -> None:
    order = positions(graph)
    anchor = members[0]
    sources = [_part(node) for node in members]
    for source in sources:
        _move_inputs_before(source, anchor, order)
    with graph.inserting_before(anchor):
        parts = [_flat(graph, source, [-1]) for source in sources]
        flat = call(graph, _aten.cat.default, (parts,), "bucket")
        wait = gather(graph, flat, anchor.args[-1], _purpose(members), ctx)
        whole = unpack(_flat(graph, wait, [ctx.world_size, -1]))
        offset = 0
        replaced = []
        for node, source in zip(members, sources, strict=True):
            numel = numel_of(source.meta["val"])
            wait = _wait_of(node)
            columns = unpack(call(graph, _aten.slice.Tensor, (whole, 1, offset, offset + numel)))
            copied = unpack(compact(graph, columns))
            full = unpack(_flat(graph, copied, list(wait.meta["val"].shape)))
            replaced.append((wait, full))
            offset += numel
    for wait, full in replaced:  # not above: the anchor, where nodes go in, is among them
        _drop(graph, wait, full)
    # The copies that each member's exchange had are dead now; the caller removes them.


def _pack_all_reduces(graph: fx.Graph, members: list[fx.Node]) -> None:
    anchor = last_of(members, positions(graph))
    sources: list[fx.Node] = [node.args[0] for node in members]  # type: ignore[misc]
    waits = [_wait_of(node) for node in members]
    with graph.inserting_before(anchor):
        parts = [_flat(graph, source, [-1]) for source in sources]
        flat = call(graph, _aten.cat.default, (parts,), "bucket")
        start = start_collective(graph, ALL_REDUCE, (flat, *anchor.args[1:]), _purpose(members))
        whole = call(graph, WAIT, (start,), "reduced")
        offset = 0
        replaced = []
        for source, wait in zip(sources, waits, strict=True):
            numel = numel_of(source.meta["val"])
            piece = unpack(call(graph, _aten.slice.Tensor, (whole, 0, offset, offset + numel)))
            replaced.append((wait, unpack(_flat(graph, piece, list(wait.meta["val"].shape)))))
            offset += numel
    _drop_late(graph, replaced)


def _pack_scatters(graph: fx.Graph, members: list[fx.Node], ctx: Context) -> None:
    anchor = last_of(members, positions(graph))
    world_size = ctx.world_size
    sources: list[fx.Node] = [node.args[0] for node in members]  # type: ignore[misc]
    waits = [_wait_of(node) for node in members]
    with graph.inserting_before(anchor):
        parts = [_flat(graph, source, [world_size, -1]) for source in sources]
        table = call(graph, _aten.cat.default, (parts, 1), "bucket")
        flat = _flat(graph, table, [-1])
        columns = table.meta["val"].shape[1]
        purpose = _purpose(members)
        if anchor.target is REDUCE_SCATTER:
            start = start_collective(graph, REDUCE_SCATTER, (flat, *anchor.args[1:]), purpose)
        else:
            splits = [columns] * world_size
            args = (flat, splits, splits, anchor.args[3])
            start = start_collective(graph, ALL_TO_ALL, args, purpose)
        whole = call(graph, WAIT, (start,), "reduced")
        replaced = []
        offset = 0
        if anchor.target is ALL_TO_ALL:
            whole = unpack(_flat(graph, whole, [world_size, columns]))
        for part, wait in zip(parts, waits, strict=True):
            numel = part.meta["val"].shape[1]
            dim = 1 if anchor.target is ALL_TO_ALL else 0
            piece = unpack(call(graph, _aten.slice.Tensor, (whole, dim, offset, offset + numel)))
            if dim == 1:  # what follows views it as [N, rows, ...] and sums: give it its own memory
                piece = unpack(compact(graph, piece))
            replaced.append((wait, unpack(_flat(graph, piece, list(wait.meta["val"].shape)))))
            offset += numel
    _drop_late(graph, replaced)


def _drop_late(graph: fx.Graph, replaced: list[tuple[fx.Node, fx.Node]]) -> None:
    """Replace waits by pieces that stand later: what used the wait moves behind them."""
    last = replaced[-1][1]
    for wait, piece in replaced:
        tail = last
        for user in _users_before(wait, positions(graph), last):
            tail.append(user)
            tail = user
        _drop(graph, wait, piece)


def _users_before(node: fx.Node, order: dict[fx.Node, int], anchor: fx.Node) -> list[fx.Node]:
    """Everything that depends on a node and stands before the anchor, in order."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and order[user] < order[anchor] and user not in found:
                found.add(user)
                stack.append(user)
    return sorted(found, key=order.__getitem__)
