"""Kernel placement: the position in the schedule at which each fused node runs.

Inductor fuses the nodes of a region into kernels, and runs each kernel at the position of its
first result. A result joins an earlier kernel of its region if all its inputs exist at that
position and both loop over the same number of elements in the same order. A result of another
region also joins if the kernels are near each other and it reads a tensor of that size that the
kernel writes (the factor of a SiLU's backward reads the recomputed input of the SiLU), or both
regions read one (both halves of a gated unit's backward read the gradient of the product). A sum
over leading dimensions (a bias's gradient) loops over columns and its input is written by rows: two
kernels.

A pointwise result without a buffer is computed inside each reader, in other regions too: its
readers read its inputs.

Inductor never repeats a reduction: its result is a buffer if another kernel reads it. So a
reduction's kernel has a position of its own. Elementwise results of one reduction run in this
kernel or read this buffer, and do not read the reduction's inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from passes.annotate.annotate_costs import cost_of, region_of
from passes.annotate.realized import written_into
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import numel_of, once_for
from passes.graph.op_traits import is_reduction

#: Inductor does not fuse for a shared input alone if more kernels than this lie between
#: (``torch._inductor.scheduler.Scheduler.are_long_distant_nodes``).
FAR_KERNELS = 64


class _Loop(NamedTuple):
    """The loop of a kernel: its number of elements, row by row or column by column."""

    numel: int
    by_column: bool


_NO_LOOP = _Loop(0, by_column=False)


@dataclasses.dataclass(eq=False)
class _Kernel:
    """``at``: position of its first result. ``number``: number of kernels before it."""

    at: int
    loop: _Loop
    number: int


class _Fused(NamedTuple):
    """The inputs and the loop of a fused node, which do not depend on the order.

    ``inside``: inputs of fused kernels, each with True if it is a buffer or a reduction.
    ``outside``: all other inputs.
    ``writes``: the node itself is a buffer or a reduction.
    ``keys``: keys of the kernels that it may join: its region as a negative number, and the
    tensors outside its region with as many elements as its loop that it depends on through the
    region. A kernel also has its results as keys.
    """

    inside: tuple[tuple[int, bool], ...]
    outside: tuple[int, ...]
    writes: bool
    loop: _Loop
    keys: tuple[int, ...]


class Kernels:
    """The kernels of an annotated graph, for any order of its nodes.

    ``into``: the parts of concatenations that are written straight into the concatenation.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        nodes = dataflow.nodes
        self._fused: list[_Fused | None] = [None] * len(nodes)
        self._same_kernel: dict[int, int] = {}  # an item of several results, and its kernel
        self._alone = [False] * len(nodes)  # outside regions: whether it is a buffer
        reads: dict[int, dict[int, None]] = {}  # outside tensors that it reads through its region
        region = [region_of(node) for node in nodes]
        memory = [cost_of(node).memory_bytes > 0 for node in nodes]
        reduces = [is_reduction(node) for node in nodes]
        self.into = written_into(dataflow, [cost_of(node).in_function for node in nodes])
        buffer = [memory[i] or reduces[i] or i in self.into for i in range(len(nodes))]
        reduced: dict[int, _Loop] = {}  # of reductions and their elementwise results
        numel = functools.cache(lambda index: _numel(nodes[index]))
        for index, node in enumerate(nodes):
            traits = dataflow.traits[index]
            if traits.getitem and not traits.fusible and dataflow.inputs[index]:
                self._same_kernel[index] = dataflow.inputs[index][0]
                continue
            own = region[index]
            if own is None:
                self._alone[index] = memory[index]
                continue
            inside, outside = [], []
            mine: dict[int, None] = {}
            for source in dataflow.inputs[index]:
                read = dataflow.written[source]
                if region[read] is None:
                    outside.append(read)
                else:
                    inside.append((read, buffer[read]))
                if region[read] is None or (region[read] != own and buffer[read]):
                    # One part of a tensor, such as an item of a split, is a tensor by itself.
                    mine[source if numel(source) < numel(read) else read] = None
                    continue
                mine.update(reads[read])
                if read in reduced and (traits.getitem or numel(read) == numel(index)):
                    reduced[index] = reduced[read]
            reads[index] = {} if reduces[index] else mine
            loop, keys = _NO_LOOP, [-1 - own]
            if reduces[index]:
                reduced[index] = once_for("loop", node, _loop_of)
            if buffer[index]:
                loop = reduced.get(index) or once_for("loop", node, _loop_of)
                keys += [read for read in mine if numel(read) == loop.numel]
            self._fused[index] = _Fused(
                tuple(inside), tuple(outside), buffer[index], loop, tuple(keys)
            )

    def places(self, order: Sequence[int]) -> list[int]:
        """For every node, the position in the order at which the kernel of its result runs.

        ``order``: the nodes in execution order, by their indices in the dataflow. A fused node
        that writes no buffer has its own position.
        """
        runs = [0] * len(order)
        needs = [0] * len(order)  # the last position of the inputs of a fused node's region
        fused, earlier = self._fused, _EarlierKernels()
        for place, index in enumerate(order):
            one = fused[index]
            if one is None:
                source = self._same_kernel.get(index)  # all results exist at once
                if source is None:
                    runs[index] = place
                    earlier.count += self._alone[index]
                else:
                    runs[index] = runs[source]
                continue
            needed = -1
            for read in one.outside:
                if runs[read] > needed:
                    needed = runs[read]
            for read, writes in one.inside:
                # A node that writes may be in the same kernel, but not in a later kernel.
                needed = max(needed, needs[read], runs[read] - 1 if writes else -1)
            needs[index] = needed
            runs[index] = earlier.joined(one, index, needed, place) if one.writes else place
        return runs


class _EarlierKernels:
    """The kernels up to a position of the schedule.

    ``count``: their number, with the kernels outside of regions.
    """

    def __init__(self) -> None:
        self.count = 0
        self._by_key: dict[int, list[_Kernel]] = {}  # by regions and inputs

    def joined(self, result: _Fused, index: int, needed: int, place: int) -> int:
        """The position of the kernel that a result joins, or begins at ``place``.

        ``needed``: the last position at which an input of the result is written.
        """
        for kernel in self._candidates(result.keys):
            if needed < kernel.at and result.loop == kernel.loop:
                break
        else:
            kernel = _Kernel(place, result.loop, self.count)
            self.count += 1
        for key in (*result.keys, index):
            known = self._by_key.setdefault(key, [])
            if kernel not in known:
                known.append(kernel)
        return kernel.at

    def _candidates(self, keys: Sequence[int]) -> Iterator[_Kernel]:
        """Kernels that a result may join: of its region, then near kernels with a shared input."""
        yield from self._by_key.get(keys[0], ())
        for tensor in keys[1:]:
            for kernel in self._by_key.get(tensor, ()):
                if self.count - kernel.number <= FAR_KERNELS:
                    yield kernel


def _loop_of(node: fx.Node) -> _Loop:
    """The loop of a fused node; a reduction loops over its input."""
    if not is_reduction(node):
        return _Loop(_numel(node), by_column=False)
    numel = max(map(_numel, [node, *node.all_input_nodes]))
    return _Loop(numel, by_column=not _reduces_rows(node))


def _reduces_rows(node: fx.Node) -> bool:
    """Whether a reduction is over all dimensions or over the last dimensions."""
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
