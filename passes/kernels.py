"""Kernels: where the nodes of a fused region really run.

Inductor fuses what it can of a region into one kernel, also results that only share what they
read (both halves of a gated unit's backward), and puts the kernel where its first result
stands. A result joins an earlier kernel of its region if all that it reads is there by then
and it runs over as many elements.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from passes.annotate import cost_of, region_of
from passes.fusion import REDUCTIONS, is_fusible
from passes.graph import WAIT, is_alias, is_getitem, numel_of


@dataclasses.dataclass
class _Kernel:
    place: int
    numel: int


def kernel_places(place: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For every node, the place of the kernel that writes its result.

    ``place``: of every node in the order of the graph, in that order. Nodes inside a kernel
    that write nothing are at their own.
    """
    runs: dict[fx.Node, int] = {}
    needs: dict[fx.Node, int] = {}  # the last place of what a fused node's region reads
    kernels: dict[int, list[_Kernel]] = {}
    for node, index in place.items():
        runs[node] = index
        source = node.args[0] if is_getitem(node) else None
        if isinstance(source, fx.Node) and not is_fusible(node):
            runs[node] = runs[source]  # all results of one kernel are there at once
            continue
        region = region_of(node)
        if region is None:
            continue
        needs[node] = -1
        for read in map(_written_at, node.all_input_nodes):
            if region_of(read) != region:
                needs[node] = max(needs[node], runs[read])
            else:  # one that writes may be in the same kernel, not in a later one
                writes = cost_of(read).memory_bytes > 0
                needs[node] = max(needs[node], needs[read], runs[read] - 1 if writes else -1)
        if cost_of(node).memory_bytes == 0:
            continue
        numel = _iterations(node)
        mine = kernels.setdefault(region, [])
        for kernel in mine:
            if needs[node] < kernel.place and numel == kernel.numel:
                runs[node] = kernel.place
                break
        else:
            mine.append(_Kernel(index, numel))
    return runs


def _written_at(node: fx.Node) -> fx.Node:
    """What must have run for a tensor to be there: of a view what it shows, up to a wait."""
    while is_alias(node) and node.target is not WAIT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _iterations(node: fx.Node) -> int:
    """Elements that a fused node's loop runs over: of a reduction, those that it reads."""
    values = [node.meta.get("val")]
    if torch.Tag.reduction in getattr(node.target, "tags", ()) or node.target in REDUCTIONS:
        values += [source.meta.get("val") for source in node.all_input_nodes]
    return max((numel_of(v) for v in values if isinstance(v, torch.Tensor)), default=0)
