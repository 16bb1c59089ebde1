"""Kernels: where the nodes of a fused region really run.

Inductor fuses what it can of a region into one kernel and puts the kernel where its first
result stands. A result joins an earlier kernel of its region if all that it reads is there by
then and it runs over as many elements. So does one of another region, if both read a tensor of
that many elements (both halves of a gated unit's backward read the gradient of the product)
and they are not far apart. A sum over leading dimensions (a bias's gradient) runs over columns,
and what it reads is written row by row: they are two kernels.

Inductor never reduces twice: a reduction's result is a buffer wherever it is read from another
kernel. So it stands in a kernel of its own place, and what is computed of it alone, one element of
each, is in that kernel or reads that buffer, and not what was reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from passes.annotate.annotate_costs import cost_of, region_of
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import numel_of, once_for
from passes.graph.op_traits import is_reduction

#: Inductor does not fuse across more kernels than this only for what both read
#: (``torch._inductor.scheduler.Scheduler.are_long_distant_nodes``).
FAR_KERNELS = 64


class _Loop(NamedTuple):
    """What a kernel runs over: so many elements, row by row or column by column."""

    numel: int
    by_column: bool


_NO_LOOP = _Loop(0, by_column=False)


@dataclasses.dataclass(eq=False)
class _Kernel:
    """``at``: where its first result is. ``number``: of kernels before it."""

    at: int
    loop: _Loop
    number: int


class _Fused(NamedTuple):
    """What does not depend on the order of a fused node: what it reads, and its loop.

    ``inside``: tensors of its own region, and whether each is written to memory or reduced.
    ``outside``: other tensors that it reads itself.
    ``writes``: it is the one or the other itself.
    ``keys``: its region as a number below zero, and the tensors outside that its region reads on
    the way to it, of as many elements: what it may share with a kernel that it joins.
    """

    inside: tuple[tuple[int, bool], ...]
    outside: tuple[int, ...]
    writes: bool
    loop: _Loop
    keys: tuple[int, ...]


class Kernels:
    """The kernels of an annotated graph, for any order that its nodes are put in."""

    def __init__(self, dataflow: Dataflow) -> None:
        nodes = dataflow.nodes
        self._fused: list[_Fused | None] = [None] * len(nodes)
        self._same_kernel: dict[int, int] = {}  # one of several results, and the kernel
        self._alone = [False] * len(nodes)  # whether it writes
        reads: dict[int, dict[int, None]] = {}  # outside tensors that its region reads
        region = [region_of(node) for node in nodes]
        numel: dict[int, int] = {}
        memory = [cost_of(node).memory_bytes > 0 for node in nodes]
        reduces = [is_reduction(node) for node in nodes]
        reduced: dict[int, _Loop] = {}  # of reductions, and of what is computed of one alone
        for index, node in enumerate(nodes):
            traits = dataflow.traits[index]
            if traits.getitem and not traits.fusible and dataflow.inputs[index]:
                self._same_kernel[index] = dataflow.inputs[index][0]
                continue
            own = region[index]
            if own is None:
                self._alone[index] = memory[index]
                continue
            writes = memory[index] or reduces[index]
            inside, outside = [], []
            mine = reads[index] = {}
            for source in dataflow.inputs[index]:
                read = dataflow.written[source]
                if region[read] == own:
                    inside.append((read, memory[read] or reduces[read]))
                    if not reduces[read]:
                        mine.update(reads[read])
                    if read in reduced and (traits.getitem or _numel(nodes[read]) == _numel(node)):
                        reduced[index] = reduced[read]
                else:
                    outside.append(read)
                    mine[read] = None
            loop, keys = _NO_LOOP, [-1 - own]
            if reduces[index]:
                reduced[index] = once_for("loop", node, _loop_of)
            if writes:
                loop = reduced.get(index) or once_for("loop", node, _loop_of)
                for read in mine:
                    if read not in numel:
                        numel[read] = _numel(nodes[read])
                    if numel[read] == loop.numel:
                        keys.append(read)
            self._fused[index] = _Fused(tuple(inside), tuple(outside), writes, loop, tuple(keys))

    def places(self, order: Sequence[int]) -> list[int]:
        """For every node, the place in the order of the kernel that writes its result.

        ``order``: the nodes as they run, by their places in the wiring. Nodes inside a kernel
        that write nothing are at their own.
        """
        runs = [0] * len(order)
        needs = [0] * len(order)  # the last place of what a fused node's region reads
        mates: dict[int, list[_Kernel]] = {}  # kernels by region and what they read
        fused, number = self._fused, 0
        for place, index in enumerate(order):
            one = fused[index]
            if one is None:
                source = self._same_kernel.get(index)  # all its results are there at once
                if source is None:
                    runs[index] = place
                    number += self._alone[index]
                else:
                    runs[index] = runs[source]
                continue
            needed = -1
            for read in one.outside:
                if runs[read] > needed:
                    needed = runs[read]
            for read, writes in one.inside:
                # One that writes may be in the same kernel, not in a later one.
                needed = max(needed, needs[read], runs[read] - 1 if writes else -1)
            needs[index] = needed
            runs[index] = place
            if not one.writes:
                continue
            for kernel in _earlier(mates, one.keys, number):
                if needed < kernel.at and one.loop == kernel.loop:
                    break
            else:
                kernel = _Kernel(place, one.loop, number)
                number += 1
            runs[index] = kernel.at
            for key in one.keys:
                known = mates.setdefault(key, [])
                if kernel not in known:
                    known.append(kernel)
        return runs


def _earlier(
    mates: dict[int, list[_Kernel]], keys: Sequence[int], number: int
) -> Iterator[_Kernel]:
    """Kernels that a result may join: of its region, then near ones that read the same."""
    yield from mates.get(keys[0], ())
    for tensor in keys[1:]:
        for kernel in mates.get(tensor, ()):
            if number - kernel.number <= FAR_KERNELS:
                yield kernel


def _loop_of(node: fx.Node) -> _Loop:
    """The loop of a fused node: a reduction's is over what it reads."""
    if not is_reduction(node):
        return _Loop(_numel(node), by_column=False)
    numel = max(map(_numel, [node, *node.all_input_nodes]))
    return _Loop(numel, by_column=not _reduces_rows(node))


def _reduces_rows(node: fx.Node) -> bool:
    """Whether a reduction is over all dimensions, or over the last ones."""
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    over = node.args[1] if len(node.args) > 1 else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return True
    if not isinstance(over, int | list | tuple):
        return True
    dims = sorted(dim % value.dim() for dim in ([over] if isinstance(over, int) else over))
    return dims == list(range(value.dim() - len(dims), value.dim()))


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return numel_of(value) if isinstance(value, torch.Tensor) else 0
