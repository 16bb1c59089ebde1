"""Order of slices: all nodes of a slice before the nodes of the next.

So only one slice is in memory at a time.

Needs: the nodes of slices, with the index of their slice.
Leaves: the same nodes in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import fx

from passes.graph.fx_utils import bytes_of, is_alias
from passes.ops.markers import LEFT_OUT, UNSHARD
from passes.ops.slicing import TAKE_PART, TAKE_SLICE


def one_slice_after_the_other(graph: fx.Graph, index: Mapping[fx.Node, int]) -> None:
    """Group the nodes of each slice, as far as none of them needs a whole tensor in between.

    What a slice does not need stays behind the slices that it stood behind, so that its result does
    not live as long as they run. Of a result smaller than an input, the input would.

    ``index``: by node of a slice, the index of the slice.
    """
    order = _Order(index)
    for node in graph.nodes:
        order.append(node)
    order.flush()
    for before, node in itertools.pairwise(order.found):
        if before.next is not node:
            before.append(node)


class _Order:
    """The nodes in their new order, one by one.

    ``found``: nodes that have their place.
    """

    def __init__(self, index: Mapping[fx.Node, int]) -> None:
        self.found: list[fx.Node] = []
        self._index = index
        self._slices: dict[fx.Node, None] = {}  # nodes of slices that wait for their place
        self._behind: dict[fx.Node, None] = {}  # other nodes, which stay after these
        self._bound: set[fx.Node] = set()  # those of them that depend on slices

    def append(self, node: fx.Node) -> None:
        """Take the graph's next node."""
        inputs = node.all_input_nodes
        if node.target is LEFT_OUT:  # between the same layers as before
            self.flush()
        if node in self._index:
            # An early slice of this operator may read a later slice of another operator.
            later = (
                source in self._slices and self._index[source] > self._index[node]
                for source in inputs
            )
            if any(later) or not self._bound.isdisjoint(inputs):
                self.flush()
            self._put_ahead(inputs)
            self._slices[node] = None
        elif any(source in self._slices or source in self._bound for source in inputs):
            self._behind[node] = None
            self._bound.add(node)
        elif self._slices and not (self._behind.keys().isdisjoint(inputs) and _shrinks(node)):
            self._behind[node] = None
        else:
            self.found.append(node)

    def flush(self) -> None:
        """Give the waiting nodes their places, but for gathers that nothing reads yet."""
        late = self._gathered_early()
        slices = (node for node in self._slices if node not in late)
        self.found.extend(sorted(slices, key=self._index.__getitem__))  # stable
        self.found.extend(self._behind)
        self._slices = {node: None for node in self._slices if node in late}
        self._behind.clear()
        self._bound.clear()

    def _gathered_early(self) -> set[fx.Node]:
        """Gathers of slices, and views of these, that no node with a place or waiting reads."""
        late: set[fx.Node] = set()
        for node in reversed(self._slices):
            gathers = node.target in (TAKE_PART, TAKE_SLICE, UNSHARD) or is_alias(node)
            is_read = any(
                user in self._behind or (user in self._slices and user not in late)
                for user in node.users
            )
            if gathers and not is_read:
                late.add(node)
        return late

    def _put_ahead(self, needed: list[fx.Node]) -> None:
        """Give nodes that no slice is needed for, and what they need, places before the slices."""
        found: set[fx.Node] = set()
        while needed:
            node = needed.pop()
            if node in self._behind and node not in found:
                found.add(node)
                needed += node.all_input_nodes
        self.found.extend(node for node in self._behind if node in found)
        for node in found:
            del self._behind[node]


def _shrinks(node: fx.Node) -> bool:
    """Whether a node makes less than it reads, as the sum of a bias's gradient, or a view."""
    if is_alias(node):
        return True
    sizes = [
        bytes_of(value) if isinstance(value := one.meta.get("val"), torch.Tensor) else 0
        for one in (node, *node.all_input_nodes)
    ]
    return 0 < sizes[0] < max(sizes[1:], default=0)
