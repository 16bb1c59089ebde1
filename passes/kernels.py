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
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from passes.annotate import cost_of, region_of
from passes.fusion import is_fusible, is_reduction
from passes.graph import WAIT, is_alias, is_getitem, numel_of

#: Inductor does not fuse across more kernels than this only for what both read
#: (``torch._inductor.scheduler.Scheduler.are_long_distant_nodes``).
FAR_KERNELS = 64


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What a kernel runs over: so many elements, row by row or column by column."""

    numel: int
    by_column: bool


_NO_LOOP = _Loop(0, by_column=False)


@dataclasses.dataclass
class _Kernel:
    """``place``: of its first result. ``number``: of kernels before it."""

    place: int
    loop: _Loop
    number: int


@dataclasses.dataclass(frozen=True)
class _Fused:
    """What does not depend on the order of a fused node: what it reads, and its loop.

    ``inside``: tensors of its own region, and whether each is written to memory or reduced.
    ``outside``: other tensors that it reads itself.
    ``writes``: it is the one or the other itself.
    ``large``: tensors outside that its region reads on the way to it, of as many elements.
    """

    region: int
    inside: tuple[tuple[fx.Node, bool], ...]
    outside: tuple[fx.Node, ...]
    writes: bool
    loop: _Loop
    large: tuple[fx.Node, ...]


class Kernels:
    """The kernels of an annotated graph, for any order that its nodes are put in."""

    def __init__(self, graph: Iterable[fx.Node]) -> None:
        """``graph``: its nodes, in one of the orders they can run in."""
        self._fused: dict[fx.Node, _Fused] = {}
        self._same_kernel: dict[fx.Node, fx.Node] = {}  # one of several results, and the kernel
        self._alone: dict[fx.Node, bool] = {}  # whether it writes
        reads: dict[fx.Node, dict[fx.Node, None]] = {}  # outside tensors that its region reads
        reduced: dict[fx.Node, _Loop] = {}  # of reductions, and of what is computed of one alone
        for node in graph:
            source = node.args[0] if is_getitem(node) else None
            if isinstance(source, fx.Node) and not is_fusible(node):
                self._same_kernel[node] = source
                continue
            region = region_of(node)
            if region is None:
                self._alone[node] = cost_of(node).memory_bytes > 0
                continue
            writes = _writes(node)
            inside, outside = [], []
            reads[node] = {}
            for read in map(_written_at, node.all_input_nodes):
                if region_of(read) == region:
                    inside.append((read, _writes(read)))
                    if not is_reduction(read):
                        reads[node] |= reads[read]
                    if read in reduced and (is_getitem(node) or _numel(read) == _numel(node)):
                        reduced[node] = reduced[read]
                else:
                    outside.append(read)
                    reads[node][read] = None
            if is_reduction(node):
                reduced[node] = _loop_of(node)
            loop = reduced.get(node) or _loop_of(node) if writes else _NO_LOOP
            large = [read for read in reads[node] if writes and _numel(read) == loop.numel]
            self._fused[node] = _Fused(
                region, tuple(inside), tuple(outside), writes, loop, tuple(large)
            )

    def places(self, place: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """For every node, the place of the kernel that writes its result.

        ``place``: of every node in the order of the graph, in that order. Nodes inside a kernel
        that write nothing are at their own.
        """
        runs: dict[fx.Node, int] = {}
        needs: dict[fx.Node, int] = {}  # the last place of what a fused node's region reads
        mates: dict[int | fx.Node, list[_Kernel]] = {}  # kernels by region and what they read
        number = 0
        for node, index in place.items():
            one = self._fused.get(node)
            if one is None:
                source = self._same_kernel.get(node)  # all its results are there at once
                runs[node] = index if source is None else runs[source]
                number += source is None and self._alone[node]
                continue
            needed = -1
            for read in one.outside:
                needed = max(needed, runs[read])
            for read, writes in one.inside:
                # One that writes may be in the same kernel, not in a later one.
                needed = max(needed, needs[read], runs[read] - 1 if writes else -1)
            needs[node] = needed
            runs[node] = index
            if not one.writes:
                continue
            for kernel in _earlier(mates, one.region, one.large, number):
                if needed < kernel.place and one.loop == kernel.loop:
                    break
            else:
                kernel = _Kernel(index, one.loop, number)
                number += 1
            runs[node] = kernel.place
            keys: list[int | fx.Node] = [one.region, *one.large]
            for key in keys:
                if kernel not in mates.setdefault(key, []):
                    mates[key].append(kernel)
        return runs


def _earlier(
    mates: dict[int | fx.Node, list[_Kernel]], region: int, read: Sequence[fx.Node], number: int
) -> Iterator[_Kernel]:
    """Kernels that a result may join: of its region, then near ones that read the same."""
    yield from mates.get(region, [])
    for tensor in read:
        for kernel in mates.get(tensor, []):
            if number - kernel.number <= FAR_KERNELS:
                yield kernel


def _written_at(node: fx.Node) -> fx.Node:
    """What must have run for a tensor to be there: of a view what it shows, up to a wait."""
    while is_alias(node) and node.target is not WAIT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _writes(node: fx.Node) -> bool:
    """Whether a fused node's result is what a kernel is for: in memory, or a reduction's."""
    return cost_of(node).memory_bytes > 0 or is_reduction(node)


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
