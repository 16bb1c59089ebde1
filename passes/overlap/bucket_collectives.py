"""Bucket: small collectives travel together.

Needs: collectives started and waited for on the spot (after ``shard``).
Leaves: collectives of ``plan.bucket_bytes`` or more alone and without a copy; smaller
ones of one kind, dtype and group packed into flat buckets of up to that size, gathers in
the order of their first use, reductions in the order their gradients are ready.

Before::                                   After::

    a = wait(all_gather(p, N))                 f = pack([p, q])
    b = wait(all_gather(q, N))                 w = wait(all_gather(f, N))
                                               a = unpack(w, columns of p); b = unpack(w, ...)

The packing never depends on batch sizes, so that ranks with different batches agree: it is
the plan's (``plan.order``), and where the plan was made for another graph it follows from
the parameters' sizes. Gradients come out of a bucket as views of
it: nothing is copied back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

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
from passes.types.context import Context
from passes.types.plan import Collective

_aten = torch.ops.aten


class Packable(NamedTuple):
    """A collective that may be packed: with others of its kind, if it is small enough."""

    kind: Hashable
    size_bytes: int
    is_first_leg: bool


def bucket_bytes_for(ctx: Context) -> int:
    """Up to what size collectives travel together: where latency is a tenth of the transfer.

    A power of two from 64 KiB to 32 MiB.
    """
    rate = ctx.hardware.collectives["all_gather"]
    if rate.seconds_per_byte <= 0:
        return 1 << 25
    worth = 10 * rate.latency_seconds / rate.seconds_per_byte
    return 1 << min(25, max(16, math.ceil(math.log2(max(worth, 1)))))


def bucket(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Pack small collectives. See the module's docstring."""
    graph = gm.graph
    starts = [node for node in graph.nodes if COLLECTIVE in node.meta]
    planned = ctx.plan.order_for(ctx.phase.value, [node.meta[COLLECTIVE] for node in starts])
    gm.meta[PACKABLE] = packable = [_packable(node) for node in starts]
    if planned is None:
        together = packed(packable, ctx.plan.bucket_bytes)
        buckets = [[starts[index] for index in members] for members in together]
    else:
        buckets = _as_planned(starts, planned)
    for members in buckets:
        if members[0].meta[COLLECTIVE].gathers:
            _pack_gathers(graph, members, ctx)
        elif members[0].target is ALL_REDUCE:
            _pack_all_reduces(graph, members)
        else:
            _pack_scatters(graph, members, ctx)
    remove_dead(graph)
    return gm


def _as_planned(starts: list[fx.Node], planned: Sequence[Collective]) -> list[list[fx.Node]]:
    """Collectives to pack together, as the plan says."""
    start_of = {node.meta[COLLECTIVE]: node for node in starts}
    return [
        [start_of[Collective((name,), bucket.gathers)] for name in bucket.names]
        for bucket in planned
        if len(bucket.names) > 1 and bucket.leg == 0
    ]


def _packable(start: fx.Node) -> Packable:
    purpose = start.meta[COLLECTIVE]
    kind = start.target, group_of(start), purpose.gathers, start.meta["val"].dtype
    # A later leg goes with the first one.
    return Packable(kind, collective_full_bytes(start), not purpose.leg)


def packed(starts: Sequence[Packable], most_bytes: int) -> list[list[int]]:
    """Which collectives are packed together: lists of two indices or more, in their order."""
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    done: list[list[int]] = []
    for index, (kind, size_bytes, is_first_leg) in enumerate(starts):
        if size_bytes >= most_bytes or not is_first_leg:
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
    names = tuple(name for node in members for name in node.meta[COLLECTIVE].names)
    return Collective(names, gathers=members[0].meta[COLLECTIVE].gathers)


def _tensor(start: fx.Node) -> fx.Node:
    """What a collective is about: its input, before it was packed or flattened."""
    source: Any = start.args[0]
    if source.target in (PACK, PACK_COLUMNS):
        source = source.args[0][0]
    elif source.target is _aten.view.default:
        source = source.args[0]
    assert isinstance(source, fx.Node)
    return source


def _gradient(start: fx.Node) -> fx.Node:
    """The gradient that a scatter reduces: undivided, for the bucket divides by itself."""
    tensor = _tensor(start)
    if start.target is REDUCE_SCATTER:
        while tensor.target is not _aten.mul.Tensor:  # compacted after the division
            tensor = tensor.all_input_nodes[0]
        return tensor.all_input_nodes[0]
    return tensor


def _drop(graph: fx.Graph, result: fx.Node, by: fx.Node) -> None:
    """Put ``by`` in the place of a collective's result: its last wait, or the mean after it."""
    result.replace_all_uses_with(by)
    if GRADIENT_OF in result.meta:
        by.meta[GRADIENT_OF] = result.meta[GRADIENT_OF]
    purpose: Collective | None = None
    while purpose is None or purpose.leg:  # back to where the first leg starts
        source, purpose = result.all_input_nodes[0], result.meta.get(COLLECTIVE)
        graph.erase_node(result)
        result = source


def _move_inputs_before(node: fx.Node, anchor: fx.Node) -> None:
    """Bring a gather's input chain (a pad of a placeholder) before the anchor."""
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
    for wait, full in replaced:  # not above: the anchor, where nodes go in, is among them
        _drop(graph, wait, full)
    # What each member was packed into is dead now; the caller removes it.


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
    """Where a part or a whole first stands: the last wait, or the mean or the copy after it."""
    wait = _wait_of(start)
    (first, *_) = wait.users
    result = first if first.target in (MEAN_RANKS, UNPACK) else wait
    later = next((user for user in result.users if COLLECTIVE in user.meta), None)
    return result if later is None or not later.meta[COLLECTIVE].leg else _result_of(later)


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
    """Replace waits by pieces that stand later: what used the wait moves behind them."""
    last = replaced[-1][1]
    for wait, piece in replaced:
        tail = last
        for user in _users_before(wait, last):
            tail.append(user)
            tail = user
        _drop(graph, wait, piece)


def _users_before(node: fx.Node, anchor: fx.Node) -> list[fx.Node]:
    """Everything that depends on a node and stands before the anchor, in order."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and user < anchor and user not in found:
                found.add(user)
                stack.append(user)
    return sorted(found)
