"""Dataflow: inputs, readers, writers and memory roots of all nodes, by index in graph order.

These relations follow views and waits. A node's *writer* is the last node that wrote its data. A
node's *root* owns its memory (an all-reduce works in place). A node's *readers* are the nodes that
read its data through views. All relations are computed once, because passes query them for every
node many times.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx

from passes.graph.fx_utils import ALL_REDUCE, COLLECTIVES, WAIT, aliases, by_target, is_alias
from passes.graph.op_traits import fuses, is_fusible
from passes.ops.markers import LEFT_OUT, REDUCE_GRAD, UNSHARD
from passes.ops.model_collectives import kind_of
from passes.ops.packing import PACKING


class OpTraits(NamedTuple):
    """Properties of an operator; see the functions of ``fx_utils.py`` and ``op_traits.py``."""

    alias: bool = False
    fusible: bool = False
    collective: bool = False
    marker: bool = False
    packing: bool = False
    getitem: bool = False
    model_collective: bool = False

    @property
    def stands_alone(self) -> bool:
        """Whether a call is a kernel of torch's own."""
        return not any(self)


@by_target
def traits_of(target: Any) -> OpTraits:
    """The traits of a called operator; ``fusible`` of ``getitem`` depends on its source."""
    return OpTraits(
        aliases(target),
        fuses(target),
        target in COLLECTIVES,
        target in (UNSHARD, REDUCE_GRAD, LEFT_OUT),
        target in PACKING,
        target is operator.getitem,
        kind_of(target) is not None,
    )


class Dataflow:
    """The nodes of a graph, output last, and the module's relations as lists by node index.

    ``place``: index of each node. ``called``: whether a node calls an operator; ``traits``: the
    traits of this operator. ``alias`` and ``fusible`` are two of them, as separate lists.
    ``inputs``: input nodes in argument order, each once. ``written``: like ``writer``, but a wait
    counts as a write.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = place = {node: index for index, node in enumerate(self.nodes)}
        self.called: list[bool] = []
        self.traits: list[OpTraits] = []
        self.inputs: list[list[int]] = []
        self.writer: list[int] = []
        self.written: list[int] = []
        self.root: list[int] = []
        users: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            inputs = [place[source] for source in node.all_input_nodes]
            for source in inputs:
                users[source].append(index)
            self.inputs.append(inputs)
            writer = written = root = index
            called = node.op == "call_function"
            traits = _FRAME
            if called:
                target = node.target
                traits = traits_of(target)
                if traits.getitem:
                    traits = _item_traits(node)
                if traits.alias or target is ALL_REDUCE:
                    first = node.args[0]
                    if isinstance(first, fx.Node):
                        source = place[first]
                        root = self.root[source]
                        if traits.alias:
                            writer = self.writer[source]
                            if target is not WAIT:
                                written = self.written[source]
            self.called.append(called)
            self.traits.append(traits)
            self.writer.append(writer)
            self.written.append(written)
            self.root.append(root)
        self.alias = [traits.alias for traits in self.traits]
        self.fusible = [traits.fusible for traits in self.traits]
        self.readers = self._readers(users)

    def _readers(self, users: list[list[int]]) -> list[list[int]]:
        readers, alias = users, self.alias
        for index in range(len(users) - 1, -1, -1):
            own = users[index]
            if any(map(alias.__getitem__, own)):
                found: dict[int, None] = {}
                for user in own:
                    if alias[user]:
                        found.update(dict.fromkeys(readers[user]))
                    else:
                        found[user] = None
                readers[index] = list(found)
        return readers

    def returned(self) -> set[int]:
        """Indices of the nodes whose memory the graph returns."""
        return {self.root[source] for source in self.inputs[-1]}


def _item_traits(node: fx.Node) -> OpTraits:
    if is_alias(node):
        return _VIEW_ITEM
    return _FUSED_ITEM if is_fusible(node) else _ITEM


_FRAME = OpTraits()
_ITEM = OpTraits(getitem=True)
_FUSED_ITEM = OpTraits(fusible=True, getitem=True)
_VIEW_ITEM = OpTraits(alias=True, getitem=True)
