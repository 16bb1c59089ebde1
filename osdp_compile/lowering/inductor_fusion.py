"""Inductor fusion: keep the kernels in the order of the schedule.

Inductor fuses a kernel with a reader of its result. The fused kernel runs when the inputs of both
are ready. All other readers of the result then wait too, among them collectives that the schedule
starts earlier. The inputs of the first kernel then live longer. This module refuses the fusion if
the first kernel would so wait for an extern kernel (an operator that Inductor calls and does not
generate), and its result has other readers or fewer bytes than the inputs that it is the last to
read. A reader that adds to zeros waits for all extern kernels that run before the zeros are filled.

Inductor also fuses kernels that read one tensor. If the earlier of them would wait for an extern
kernel, its inputs would live until then. This module refuses this fusion too.

After fusion Inductor visits the kernels in the order of their first results, and puts all that a
kernel needs directly before it. So an early result that is fused with a late one pulls all that the
late one needs before the kernels between them. Inductor also computes a pointwise result that one
extern kernel reads directly before this kernel. In both cases buffers that the kernels between read
live longer than in the schedule. This module restores the order of the schedule.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import heapq
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from osdp_compile import _torch
from passes.graph.fx_utils import bytes_of, is_alias, positions, root_of
from passes.graph.metadata import COST

#: By scheduler and node name: the place of the last extern kernel that the node waits for, or -1.
_needed: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
#: By scheduler: the places of its extern kernels, in order.
_extern_places: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
#: By scheduler and buffer name: the place of the buffer's last reader.
_last_readers: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


class InPlace(_torch.fusion.InductorChoices):
    """Inductor's choices, but no result waits for an extern kernel that it does not need."""

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether to fuse ``node2``, a reader of ``node1``, into it."""
        if _puts_off(scheduler, node1, node2) and (
            _has_others(node1, node2) or _frees_bytes(scheduler, node1)
        ):
            return False
        choose = _torch.fusion.InductorChoices.can_fuse_vertical
        return choose(scheduler, node1, node2, shared_data_score)

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether to fuse two nodes that read one tensor."""
        if _puts_off(scheduler, node1, node2) or _puts_off(scheduler, node2, node1):
            return False
        choose = _torch.fusion.InductorChoices.can_fuse_horizontal
        return choose(scheduler, node1, node2, shared_data_score)


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """A context in which Inductor uses :class:`InPlace` and :func:`in_order`."""
    ordered = _torch.fusion.after_fusion(in_order, f"osdp_compile, fusion {_source_digest()}")
    apart = _torch.fusion.with_products_apart(puts_off_product)
    with _torch.fusion.with_choices(InPlace()), ordered, apart:
        yield


def puts_off_product(product: fx.Node, total: fx.Node) -> bool:
    """Whether inputs of a product would live longer if a later sum computed it.

    They are the inputs that it is the last to read, if they have more bytes than its result and
    other operators run before the sum.
    """
    place = positions(product.graph)
    between = list(place)[place[product] + 1 : place[total]]
    if all(is_alias(node) for node in between):
        return False
    inputs = {root_of(node) for node in product.all_input_nodes}
    freed = [one for one in inputs if _last_place(one, place) <= place[product]]
    return sum(bytes_of(one.meta.get("val")) for one in freed) > bytes_of(product.meta["val"])


def _last_place(node: fx.Node, place: dict[fx.Node, int]) -> int:
    """The place of the last reader of a node or of its views."""
    readers = (_last_place(one, place) if is_alias(one) else place[one] for one in node.users)
    return max(readers, default=-1)


@functools.cache
def _source_digest() -> str:
    """A digest of this file: Inductor's cache knows nothing else of its rules."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def in_order(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels in the order of the schedule, as far as their inputs allow.

    Of the kernels whose inputs exist, the one with the earliest result is next.
    """
    writer = {name: kernel for kernel in kernels for name in kernel.get_buffer_names()}
    readers: dict[Any, list[Any]] = {kernel: [] for kernel in kernels}
    missing: dict[Any, int] = {}
    for kernel in kernels:
        sources = {writer.get(one.name) for one in kernel.unmet_dependencies} - {None, kernel}
        missing[kernel] = len(sources)
        for source in sources:
            readers[source].append(kernel)
    place = dict(zip(kernels, zip(_places(kernels), range(len(kernels)), strict=True), strict=True))
    ready = [(*place[kernel], kernel) for kernel in kernels if not missing[kernel]]
    heapq.heapify(ready)
    found = []
    while ready:
        kernel = heapq.heappop(ready)[-1]
        found.append(kernel)
        for reader in readers[kernel]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (*place[reader], reader))
    return found


def _places(kernels: list[Any]) -> list[int]:
    """For every kernel, a place in the FX graph, whose order is the schedule's.

    It is the place of the kernel's first result after all that the kernel reads.
    """
    results = _places_of_results([one for kernel in kernels for one in kernel.get_nodes()])
    written = {name: at for one, at in results.items() for name in one.get_buffer_names()}
    found = []
    for kernel in kernels:
        own = [results[one] for one in kernel.get_nodes()]
        reads = (one.name for one in kernel.unmet_dependencies)
        last = max((written[name] for name in reads if name in written), default=-1)
        found.append(min((at for at in own if at > last), default=max(own)))
    return found


def _places_of_results(results: list[Any]) -> dict[Any, int]:
    """The places in the FX graph of the nodes that Inductor's results stand for.

    Inductor's numbers count results as they are realized: a pointwise result with its reader. The
    origins of a result are the nodes that compute it. If it is realized with a reader, they may
    also be this reader and all that computes the reader's other inputs. A result that the schedule
    has inside its readers, and that Inductor writes, stays where Inductor has it.
    """
    origins = {one: set(one.node.origins) for one in results}
    graphs = {origin.graph for found in origins.values() for origin in found}
    place = {node: at for graph in graphs for at, node in enumerate(graph.nodes)}
    read: dict[str, fx.Node] = {}  # by buffer: the input of an extern kernel
    for one in results:
        if one.is_extern() and origins[one]:
            called = max(origins[one], key=place.__getitem__)
            inputs = getattr(one.node, "inputs", ())
            if len(inputs) == len(called.all_input_nodes):
                for buffer, source in zip(inputs, called.all_input_nodes, strict=True):
                    read.setdefault(buffer.get_name(), root_of(source))
    found: dict[Any, int] = {}
    last = 0  # the place of the last extern kernel
    for one in sorted(results, key=operator.attrgetter("min_order")):
        if one.is_extern():
            found[one] = last = max(map(place.__getitem__, origins[one]), default=last)
            continue
        own = [read[name] for name in one.get_buffer_names() if name in read]
        own = own or [origin for origin in origins[one] if not is_alias(origin)]
        node = max(own, key=place.__getitem__, default=None)
        cost = None if node is None else COST.get(node)
        is_inside = cost is not None and not cost.memory_bytes
        if node is None or (is_inside and place[node] < last):
            found[one] = last
        else:
            found[one] = place[node]
    return found


def _puts_off(scheduler: Any, earlier: Any, later: Any) -> bool:
    """Whether ``later`` waits for an extern kernel that runs after ``earlier``."""
    return any(_last_needed(scheduler, node) > earlier.max_order for node in later.get_nodes())


def _last_needed(scheduler: Any, node: Any) -> int:
    """The place of the last extern kernel that a node waits for, or -1.

    A node waits for the extern kernels that it needs. A node that needs a filled buffer, such as
    the zeros that ``index_put`` adds to, also waits for the extern kernels before the fill. Kernels
    that read graph inputs alone do not count: Inductor's place for one may be that of its reader.
    """
    known = _needed.setdefault(scheduler, {})
    name = node.get_name()
    if name not in known:
        known[name] = -1
        for one in (scheduler.name_to_node[ancestor] for ancestor in node.ancestors):
            if one.is_extern():
                known[name] = max(known[name], one.min_order)
            elif not one.read_writes.reads:
                known[name] = max(known[name], _extern_before(scheduler, one))
    return known[name]


def _extern_before(scheduler: Any, node: Any) -> int:
    """The place of the last extern kernel before a node in the schedule, or -1."""
    if scheduler not in _extern_places:
        every = (own for kernel in scheduler.nodes for own in kernel.get_nodes())
        _extern_places[scheduler] = sorted(one.min_order for one in every if one.is_extern())
    places = _extern_places[scheduler]
    before = bisect.bisect_left(places, node.min_order)
    return places[before - 1] if before else -1


def _has_others(node: Any, reader: Any) -> bool:
    """Whether nodes other than the reader read a node's results."""
    own = {one.get_name() for one in (*node.get_nodes(), *reader.get_nodes())}
    users = (user.node for buffer in node.get_outputs() for user in buffer.users)
    return any(
        one.get_name() not in own
        for user in users
        if isinstance(user, _torch.fusion.BaseSchedulerNode)  # not the graph's output
        for one in user.get_nodes()
    )


def _frees_bytes(scheduler: Any, node: Any) -> bool:
    """Whether the inputs that a node is the last to read have more bytes than its results."""
    if scheduler not in _last_readers:
        last: dict[str, int] = {}
        for one in (own for kernel in scheduler.nodes for own in kernel.get_nodes()):
            for read in one.read_writes.reads:
                last[read.name] = max(last.get(read.name, -1), one.min_order)
        _last_readers[scheduler] = last
    last = _last_readers[scheduler]
    graph = _torch.fusion.V.graph
    own = node.get_buffer_names()
    # The caller of a forward keeps its inputs.
    kept = own if graph.is_backward else {*own, *graph.graph_inputs}
    freed: dict[str, int] = {
        read.name: read.numbytes_hint()
        for read in node.read_writes.reads
        if read.name not in kept and last[read.name] <= node.max_order
    }
    made: dict[str, int] = {
        write.name: write.numbytes_hint()
        for write in node.read_writes.writes
        if last.get(write.name, -1) > node.max_order
    }
    return sum(freed.values()) > sum(made.values())
