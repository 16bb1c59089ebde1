"""Realized tensors: results of pointwise operators that Inductor writes to a buffer.

Inductor computes a pointwise result inside each of its readers. It *realizes* a result (computes it
once, into a buffer) that is dear to compute again: by the number of buffers that it reads, the
number of operators that it takes, and, on a CPU, operators such as ``exp``. The rules and their
thresholds are Inductor's (``StorageBox.should_realize_on_reuse`` and ``has_exceeded_max_reads`` in
``torch/_inductor/ir.py``). A reduction is always realized.

On a CPU a concatenation is a buffer in memory (``ConcatKernel`` in ``torch/_inductor/ir.py``). Each
of its parts is written by a loop over the elements of this part, which computes the part too.

A realized result needs no memory if only the loop that computes it reads it. It is a buffer in
memory if a loop over another number of elements reads it, or over the same in another order: such
loops do not fuse.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from passes._torch import realize_thresholds
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import by_target, concrete, numel_of
from passes.graph.op_traits import concatenated, is_concatenation, is_reduction

#: A loop: the number of its elements, or the sizes and the reduced dimensions of a reduction that
#: runs over its input in another order.
Loop = int | tuple[int, ...]

#: The region number of a node outside all regions.
NO_REGION = -1

_aten = torch.ops.aten
#: Operators with an ``exp``, ``log``, ``sigmoid`` or ``tanh`` in Inductor's kernel.
_HEAVY = {
    _aten.exp,
    _aten.log,
    _aten.log10,
    _aten.log1p,
    _aten.log2,
    _aten.sigmoid,
    _aten.silu,
    _aten.softplus,
    _aten.tanh,
}


#: Operators of libraries that write into memory that they are given; Inductor copies the others'
#: results.
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


@by_target
def _is_heavy(target: Any) -> bool:
    return getattr(target, "overloadpacket", None) in _HEAVY


def _numel(node: fx.Node) -> int:
    """Elements of a node's tensor; 0 for anything else."""
    value = node.meta.get("val")
    return numel_of(value) if isinstance(value, torch.Tensor) else 0


class _Realized:
    """Which results of fused nodes Inductor realizes, computed on demand.

    ``fused``: whether a node is computed in a fused kernel, by index in graph order.
    """

    def __init__(self, dataflow: Dataflow, fused: list[bool], on_cpu: bool) -> None:
        self.dataflow = dataflow
        self.fused = fused
        self.on_cpu = on_cpu
        self.thresholds = realize_thresholds(on_cpu)
        # What computes a fused node: loads and operators. Those behind a view are others than
        # those without it, because Inductor tells them apart by the elements that they are for.
        self._loads: dict[int, frozenset[Hashable]] = {}
        self._operators: dict[int, frozenset[Hashable]] = {}
        self._heavy: set[int] = set()
        self._known: dict[int, bool] = {}

    def __contains__(self, index: int) -> bool:
        stack = [index]
        while stack:
            top = stack[-1]
            if top in self._known:
                stack.pop()
                continue
            roots = (self.dataflow.writer[source] for source in self.dataflow.inputs[top])
            missing = [root for root in roots if self.fused[root] and root not in self._known]
            if missing:
                stack += missing
                continue
            self._known[top] = self._compute(stack.pop())
        return self._known[index]

    def _compute(self, index: int) -> bool:
        """Whether a node is realized; all of its inputs are known."""
        dataflow = self.dataflow
        loads: set[Hashable] = set()
        operators: set[Hashable] = set() if dataflow.traits[index].getitem else {index}
        heavy = self.on_cpu and _is_heavy(dataflow.nodes[index].target)
        for source in dataflow.inputs[index]:
            root = dataflow.writer[source]
            if self._known.get(root, True):
                loads.add(source)
                continue
            heavy = heavy or root in self._heavy
            for inlined, own in ((self._loads[root], loads), (self._operators[root], operators)):
                own |= inlined if source == root else {(source, one) for one in inlined}
        self._loads[index], self._operators[index] = frozenset(loads), frozenset(operators)
        if heavy:
            self._heavy.add(index)
        return self._is_realized(index, len(loads), len(operators), heavy)

    def _is_realized(self, index: int, loads: int, operators: int, heavy: bool) -> bool:
        nodes = self.dataflow.nodes
        node, most = nodes[index], self.thresholds
        if self.dataflow.traits[index].getitem:
            return is_reduction(nodes[self.dataflow.inputs[index][0]])
        if is_reduction(node) or any(map(self._is_in_memory_for, node.users)):
            return True
        if self.on_cpu and is_concatenation(node):
            return True
        # Inductor counts loads as operators.
        if loads > most.accumulated_reads or operators + loads > most.operators:
            return True
        is_dear = heavy or loads > most.reads
        if (heavy or (most.broadcast_is_use and is_dear)) and self._is_broadcast(index):
            return True
        return is_dear and self._most_users(node) > 1

    def _is_in_memory_for(self, user: fx.Node) -> bool:
        """Whether a direct user needs its inputs in memory: a barrier, or the graph's output."""
        return not self.fused[self.dataflow.place[user]] and not self._is_view(user)

    def _most_users(self, node: fx.Node) -> int:
        """The most users of a node or of one of its views: Inductor counts them one by one."""
        most, stack = 0, [node]
        while stack:
            users = stack.pop().users
            most = max(most, len(users))
            stack += (user for user in users if self._is_view(user))
        return most

    def _is_view(self, node: fx.Node) -> bool:
        return self.dataflow.alias[self.dataflow.place[node]]

    def _is_broadcast(self, index: int) -> bool:
        """Whether a pointwise reader computes each element of a node more than once."""
        own = _numel(self.dataflow.nodes[index])
        return any(
            _numel(self.dataflow.nodes[reader]) > own
            for reader in self.dataflow.readers[index]
            if self.fused[reader] and not is_reduction(self.dataflow.nodes[reader])
        )


def _reduction_loop(node: fx.Node) -> Loop:
    """The loop of a reduction.

    A reduction over the last dimensions runs over its input in order, as a pointwise loop does.
    """
    source = node.args[0]
    assert isinstance(source, fx.Node)
    sizes = concrete(source.meta["val"].shape)
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not dims:
        return math.prod(sizes)
    reduced = {int(dim) % len(sizes) for dim in dims} if sizes else set()
    order = [dim in reduced for dim, size in enumerate(sizes) if size != 1]
    if order == sorted(order):
        return math.prod(sizes)
    return (*sizes, *sorted(reduced))


def _loops_of_parts(dataflow: Dataflow, index: int, concatenation: int) -> frozenset[Loop]:
    """The loops that write those parts of a concatenation that read a node."""
    return frozenset(
        _numel(part)
        for part in concatenated(dataflow.nodes[concatenation])
        if dataflow.writer[dataflow.place[part]] == index
    )


def written_into(dataflow: Dataflow, fused: list[bool]) -> dict[int, int]:
    """Parts of concatenations that are written straight into the concatenation's memory.

    Returns the concatenation of each such part. Other readers of a part read this memory, too.
    Such a part is a fused kernel's or a matrix product's. Inductor fixes the layout of a tensor
    that an operator of a library reads, and copies it
    (``ConcatKernel.can_realize_into_without_copy`` in ``torch/_inductor/ir.py``).

    ``fused``: whether a node is computed in a fused kernel on a CPU, by index in graph order.
    """
    last = len(dataflow.nodes) - 1
    found: dict[int, int] = {}
    for index, node in enumerate(dataflow.nodes):
        if fused[index] and is_concatenation(node):
            for part in map(dataflow.place.__getitem__, concatenated(node)):
                own = dataflow.nodes[part]
                flexible = own.target in _PRODUCTS or (
                    fused[part] and not dataflow.traits[part].getitem and not is_concatenation(own)
                )
                readers = dataflow.readers[part]
                if flexible and all(reader == last or fused[reader] for reader in readers):
                    found.setdefault(part, index)
    return found


def read_elsewhere(dataflow: Dataflow, region: list[int], on_cpu: bool) -> set[int]:
    """Realized results that another loop reads than the one that computes them.

    ``region``: the region of every node, in graph order. Regions run apart, and so do their loops.
    A kernel on a CPU keeps no result of a reduction for the elements that were reduced; one on a
    GPU does.
    """
    fused = [own != NO_REGION for own in region]
    realized = _Realized(dataflow, fused, on_cpu)
    nodes = dataflow.nodes
    last = len(nodes) - 1
    loops: dict[int, frozenset[Loop]] = {}  # that compute a fused node
    found: set[int] = set()
    joined: set[int] = set()  # concatenations that are buffers
    for index in range(last - 1, -1, -1):
        if not fused[index]:
            continue
        node, readers = nodes[index], dataflow.readers[index]
        elsewhere: frozenset[Loop] = frozenset().union(
            *(
                _loops_of_parts(dataflow, index, reader) if reader in joined else loops[reader]
                for reader in readers
                if reader in loops
            )
        )
        own: frozenset[Loop] = frozenset((_numel(node),))
        source = nodes[dataflow.inputs[index][0]] if dataflow.traits[index].getitem else node
        reduces = is_reduction(source)
        loops[index] = frozenset((_reduction_loop(source),)) if reduces else own
        if on_cpu and is_concatenation(node):
            joined.add(index)
            found.add(index)
            continue
        home = own if on_cpu else own | loops[index]
        if elsewhere <= home and all(region[index] == region[reader] for reader in readers):
            continue
        if index not in realized:
            loops[index] = elsewhere
        elif isinstance(node.meta["val"], torch.Tensor):
            found.add(index)
    return found
