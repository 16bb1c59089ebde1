"""Dataflow: what reads what in a graph, found once for all who ask, by place in its order.

Views and waits are looked through in several ways: a node's *writer* wrote last what it shows, a
node's *root* is the one whose memory it shows (an all-reduce works in place), and its *readers*
are those that really read it. Passes ask for these of every node, again and again; a walk through
the graph for each answer was half of what a look at a plan took.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx

from passes.graph.fx_utils import ALL_REDUCE, COLLECTIVES, WAIT, aliases, by_target
from passes.graph.op_traits import fuses, is_fusible
from passes.ops.markers import LEFT_OUT, REDUCE_GRAD, UNSHARD
from passes.ops.packing import PACKING


class OpTraits(NamedTuple):
    """Properties of an operator, by the functions of these names in ``fx_utils.py``."""

    alias: bool = False
    fusible: bool = False
    collective: bool = False
    marker: bool = False
    packing: bool = False
    getitem: bool = False

    @property
    def stands_alone(self) -> bool:
        """Whether a call to it is a kernel of torch's own."""
        return not any(self)


@by_target
def traits_of(target: Any) -> OpTraits:
    """Of an operator that is called; of ``getitem`` fusible is left open."""
    return OpTraits(
        aliases(target),
        fuses(target),
        target in COLLECTIVES,
        target in (UNSHARD, REDUCE_GRAD, LEFT_OUT),
        target in PACKING,
        target is operator.getitem,
    )


class Dataflow:
    """The nodes of a graph, the output last, and by their places what is said above.

    ``called``: whether a node calls an operator; its ``traits`` are those of that, ``alias`` and
    ``fusible`` among them.
    ``inputs``: what a node reads, in argument order, each once. ``written``: as ``writer``, but a
    wait is not looked through.
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
                if traits.getitem and is_fusible(node):
                    traits = _FUSED_ITEM
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
        """The nodes whose memory the graph returns."""
        return {self.root[source] for source in self.inputs[-1]}


_FRAME = OpTraits()
_FUSED_ITEM = OpTraits(fusible=True, getitem=True)
