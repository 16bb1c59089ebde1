"""Bucket: pack small collectives into larger ones.

Needs: collectives with their wait directly after the start (after ``shard``).
Leaves: collectives of ``plan.bucket_bytes`` or more unchanged, without a copy. Smaller ones of one
kind, dtype and group are packed into flat buckets of up to that size: gathers in the order of
their first use, reductions in the order in which their gradients are ready. The collectives before
packing are in the module's ``PACKABLE``.

Before::                                   After::

    a = wait(all_gather(p, N))                 f = pack([p, q])
    b = wait(all_gather(q, N))                 w = wait(all_gather(f, N))
                                               a = unpack(w, columns of p); b = unpack(w, ...)

The packing does not depend on batch sizes, so ranks with different batches agree. It is part of
the plan (``plan.order``); for a graph that the plan has no order for, it follows from the
parameters' sizes. Reduced gradients are views of their bucket, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from passes.annotate.annotate_costs import collective_full_bytes
from passes.graph.fx_utils import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    call,
    group_of,
    numel_of,
    remove_dead,
)
from passes.graph.metadata import COLLECTIVE, GRADIENT_OF, PACKABLE
from passes.ops.packing import MEAN_RANKS, PACK, PACK_COLUMNS, UNPACK
from passes.shard.lower_markers import after_wait, gather, scatter, start_collective, unpack
from passes.types.annotations import Packable
from passes.types.context import Context
from passes.types.plan import Collective

_aten = torch.ops.aten


def bucket_bytes_for(ctx: Context) -> int:
    """The default bucket size: the bytes at which latency is a tenth of the transfer time.

    It is rounded up to a power of two between 64 KiB and 32 MiB.
    """
    rate = ctx.hardware.collectives.get("all_gather")  # the profile of one process has none
    if rate is None or rate.seconds_per_byte <= 0:
        return 1 << 25
    worth = 10 * rate.latency_seconds / rate.seconds_per_byte
    return 1 << min(25, max(16, math.ceil(math.log2(max(worth, 1)))))


def bucket(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Pack small collectives. See the module's docstring."""
    graph = gm.graph
    starts = [node for node in graph.nodes if COLLECTIVE.is_set(node)]
    planned = ctx.plan.order_for(ctx.phase.value, [COLLECTIVE.of(node) for node in starts])
    packable = [_packable(node) for node in starts]
    PACKABLE.set(gm, packable)
    if planned is None:
        together = packed(packable, ctx.plan.bucket_bytes)
        buckets = [[starts[index] for index in members] for members in together]
    else:
        buckets = _as_planned(starts, planned)
    for members in buckets:
        if COLLECTIVE.of(members[0]).gathers:
            _pack_gathers(graph, members, ctx)
        elif members[0].target is ALL_REDUCE:
            _pack_all_reduces(graph, members)
        else:
            _pack_scatters(graph, members, ctx)
    remove_dead(graph)
    return gm


def _as_planned(starts: list[fx.Node], planned: Sequence[Collective]) -> list[list[fx.Node]]:
    """The plan's buckets: lists of collectives to pack together."""
    start_of = {COLLECTIVE.of(node): node for node in starts}
    return [
        [start_of[Collective((name,), bucket.gathers)] for name in bucket.names]
        for bucket in planned
        if len(bucket.names) > 1 and bucket.stage == 0
    ]


def _packable(start: fx.Node) -> Packable:
    purpose = COLLECTIVE.of(start)
    kind = start.target, group_of(start), purpose.gathers, start.meta["val"].dtype
    # Later stages follow the packing of the first one. Activations travel alone.
    alone = purpose.stage or purpose.tokens
    return Packable(kind, collective_full_bytes(start), not alone)


def packed(starts: Sequence[Packable], most_bytes: int) -> list[list[int]]:
    """The buckets: lists of two or more indices into ``starts``, ascending.

    ``most_bytes``: the bucket size.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    done: list[list[int]] = []
    for index, (kind, size_bytes, is_first_stage) in enumerate(starts):
        if size_bytes >= most_bytes or not is_first_stage:
            continue
        if kind in open_buckets and filled[kind] + size_bytes > most_bytes:
            done.append(open_buckets.pop(kind))
        if kind not in open_buckets:
            open_buckets[kind], filled[kind] = [], 0
        open_buckets[kind].append(index)
        filled[kind] += size_bytes
    done.extend(open_buckets.values())
    return [members for members in done if len(members) > 1]


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    assert wait.target is WAIT
    return wait


def _purpose(members: Sequence[fx.Node]) -> Collective:
    names = tuple(name for node in members for name in COLLECTIVE.of(node).names)
    return Collective(names, gathers=COLLECTIVE.of(members[0]).gathers)


def _tensor(start: fx.Node) -> fx.Node:
    """The input of a collective before packing or flattening."""
    source: Any = start.args[0]
    if source.target in (PACK, PACK_COLUMNS):
        source = source.args[0][0]
    elif source.target is _aten.view.default:
        source = source.args[0]
    assert isinstance(source, fx.Node)
    return source


def _gradient(start: fx.Node) -> fx.Node:
    """The gradient that a scatter reduces, before its division: the bucket divides once."""
    tensor = _tensor(start)
    if start.target is REDUCE_SCATTER:
        while tensor.target is not _aten.mul.Tensor:  # a compaction may follow the division
            tensor = tensor.all_input_nodes[0]
        return tensor.all_input_nodes[0]
    return tensor


def _drop(graph: fx.Graph, result: fx.Node, by: fx.Node) -> None:
    """Replace a collective's result by ``by``, and erase the collective with all its stages.

    ``result``: the last wait, or the mean after it.
    """
    result.replace_all_uses_with(by)
    GRADIENT_OF.copy(result, by)
    purpose: Collective | None = None
    while purpose is None or purpose.stage:  # back to the start of the first stage
        source, purpose = result.all_input_nodes[0], COLLECTIVE.get(result)
        graph.erase_node(result)
        result = source


def _move_inputs_before(node: fx.Node, anchor: fx.Node) -> None:
    """Move a gather's input chain (such as the pad of a placeholder) before the anchor."""
    if node.op == "call_function" and node > anchor:
        for source in node.all_input_nodes:
            _move_inputs_before(source, anchor)
        anchor.prepend(node)


def _pack_gathers(graph: fx.Graph, members: list[fx.Node], ctx: Context) -> None:
    anchor = min(members)
    sources = [_tensor(node) for node in members]
    for source in sources:
        _move_inputs_before(source, anchor)
    cut = ctx.cut_by(group_of(anchor))
    with graph.inserting_before(anchor):
        packed, sent = gather(graph, sources, group_of(anchor), _purpose(members), ctx)
        start = 0
        replaced = []
        for node, source in zip(members, sources, strict=True):
            result = _result_of(node)
            shape = result.meta["val"].shape
            replaced.append((result, unpack(graph, packed, start, shape, sent, cut)))
            start += numel_of(source.meta["val"])
    for wait, full in replaced:  # after the insertions: the anchor itself is erased here
        _drop(graph, wait, full)
    # The members' own packing is dead now; the caller removes it.


def _pack_all_reduces(graph: fx.Graph, members: list[fx.Node]) -> None:
    anchor = max(members)
    sources: list[fx.Node] = [node.args[0] for node in members]  # type: ignore[misc]
    with graph.inserting_before(anchor):
        packed = call(graph, PACK, (sources,), "bucket")
        start = start_collective(graph, ALL_REDUCE, (packed, *anchor.args[1:]), _purpose(members))
        whole = call(graph, WAIT, (start,), "reduced")
        pieces = _pieces(graph, whole, [numel_of(source.meta["val"]) for source in sources])
        replaced = []
        for node, piece in zip(members, pieces, strict=True):
            wait = _wait_of(node)
            view = call(graph, _aten.view.default, (piece, list(wait.meta["val"].shape)))
            replaced.append((wait, after_wait(view)))
    _drop_late(graph, replaced)


def _pack_scatters(graph: fx.Graph, members: list[fx.Node], ctx: Context) -> None:
    anchor = max(members)
    gradients = [_gradient(node) for node in members]
    results = [_result_of(node) for node in members]
    with graph.inserting_before(anchor):
        whole = scatter(graph, gradients, group_of(anchor), _purpose(members), ctx)
        pieces = _pieces(graph, whole, [numel_of(result.meta["val"]) for result in results])
    _drop_late(graph, list(zip(results, pieces, strict=True)))


def _result_of(start: fx.Node) -> fx.Node:
    """A collective's result: the wait of its last stage, or the mean or unpack after that wait."""
    wait = _wait_of(start)
    (first, *_) = wait.users
    result = first if first.target in (MEAN_RANKS, UNPACK) else wait
    later = next((user for user in result.users if COLLECTIVE.is_set(user)), None)
    return result if later is None or not COLLECTIVE.of(later).stage else _result_of(later)


def _pieces(graph: fx.Graph, whole: fx.Node, numels: Sequence[int]) -> list[fx.Node]:
    """Consecutive views of a flat tensor."""
    found = []
    start = 0
    for numel in numels:
        args = (whole, 0, start, start + numel)
        found.append(after_wait(call(graph, _aten.slice.Tensor, args)))
        start += numel
    return found


def _drop_late(graph: fx.Graph, replaced: list[tuple[fx.Node, fx.Node]]) -> None:
    """Replace waits by pieces that stand later, and move the waits' users after the pieces."""
    last = replaced[-1][1]
    for wait, piece in replaced:
        tail = last
        for user in _users_before(wait, last):
            tail.append(user)
            tail = user
        _drop(graph, wait, piece)


def _users_before(node: fx.Node, anchor: fx.Node) -> list[fx.Node]:
    """All nodes before the anchor that depend on ``node``, in graph order."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and user < anchor and user not in found:
                found.add(user)
                stack.append(user)
    return sorted(found)
