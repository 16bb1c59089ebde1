"""Memory: what is alive while each node of an annotated, ordered graph runs.

A tensor is born with the kernel that writes it (``passes/kernels.py``) and dies after the last
kernel that reads it, views and in-place updates counted once. What lives only inside a fused
kernel takes none. What a kernel allocates for itself is there while it runs. A collective's
input lives until its wait. Parameters and everything else that the graph does not allocate are
the caller's ``base_bytes``.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from passes.annotate import cost_of
from passes.fusion import effective_users, is_fusible
from passes.graph import (
    WAIT,
    is_alias,
    is_collective,
    output_nodes,
    positions,
    root_of,
)
from passes.kernels import Kernels
from passes.packing import UNPACK

#: meta key of a placeholder whose memory is not the graph's: a parameter or a buffer.
STATIC = "static"

KINDS = ("activations", "gathered", "gradients", "communication", "inputs", "workspace")


@dataclasses.dataclass
class Memory:
    """Memory of one run of a graph on one rank, all in bytes.

    ``curve``: alive while each node runs, in the order of the graph.
    ``peak_node``: where it is the highest, the first of several.
    ``alive``: the results that are alive then; what is written over at that moment left out.
    ``peak``: their bytes by kind, with the kernel's own.
    ``kept_bytes``: still alive at the end (the graph's outputs).
    """

    curve: list[int]
    peak_node: fx.Node
    alive: list[fx.Node]
    peak: dict[str, int]
    kept_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.curve, default=0)


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """What does not depend on the order of a node's memory.

    ``size_bytes``: of what it allocates (0: nothing, or not the graph's). ``users``: who reads
    it, views and waits looked through. ``inlined``: it lives only inside its readers' kernels.
    ``owns``: it is no view. ``over``: it may be written over what dies. ``own``: others over it.
    """

    size_bytes: int
    users: tuple[fx.Node, ...]
    inlined: bool
    owns: bool
    over: bool
    own: bool


class MemoryModel:
    """The memory of an annotated graph, for any order that its nodes are put in."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._kernels = Kernels(graph.nodes)
        self._buffers: dict[fx.Node, _Buffer] = {}
        self._held: list[tuple[fx.Node, fx.Node]] = []  # and the wait until which
        self._returned = returned_roots(graph)
        for node in graph.nodes:
            if node.op == "output":
                continue
            size_bytes = 0 if node.meta.get(STATIC) else cost_of(node).memory_bytes
            users, fusible = tuple(effective_users(node)), is_fusible(node)
            self._buffers[node] = _Buffer(
                size_bytes,
                users,
                inlined=fusible and cost_of(node).memory_bytes == 0 and bool(users),
                owns=not is_alias(node),
                over=fusible and size_bytes > 0,
                own=node.op == "call_function" or bool(node.meta.get("saved", False)),
            )
            if node.target is WAIT and isinstance(node.args[0], fx.Node):
                start = node.args[0]
                if is_collective(start):
                    source = root_of(start.args[0])  # type: ignore[arg-type]
                    self._held += [(source, node), (start, node)]

    def run(self) -> Memory:
        """Memory in the order that the nodes have now. See the module's docstring."""
        place = positions(self._graph)
        nodes = list(place)
        birth = self._kernels.places(place)
        death = self._deaths(place, birth)
        dying: list[list[fx.Node]] = [[] for _ in nodes]
        born: list[list[fx.Node]] = [[] for _ in nodes]
        for node, last in death.items():
            if self._buffers[node].size_bytes:
                dying[last].append(node)
                born[birth[node]].append(node)
        alive_bytes = 0
        curve: list[int] = []
        best = 0
        over: list[fx.Node] = []  # what is written over at the peak
        for index, node in enumerate(nodes):
            replaced = self._written_over(born[index], dying[index])
            alive_bytes += self._sum(born[index])
            curve.append(alive_bytes - self._sum(replaced) + cost_of(node).workspace_bytes)
            alive_bytes -= self._sum(dying[index])
            if curve[-1] > curve[best]:
                best = index
            if best == index:
                over = replaced
        alive = [
            node
            for node, last in death.items()
            if birth[node] <= best <= last and self._buffers[node].size_bytes and node not in over
        ]
        peak = dict.fromkeys(KINDS, 0)
        for node in alive:
            peak[kind_of(node, node in self._returned)] += self._buffers[node].size_bytes
        peak["workspace"] = cost_of(nodes[best]).workspace_bytes
        end = len(nodes) - 1
        kept = self._sum([node for node, last in death.items() if last == end])
        return Memory(curve, nodes[best], alive, {k: v for k, v in peak.items() if v}, kept)

    def _sum(self, nodes: list[fx.Node]) -> int:
        return sum([self._buffers[node].size_bytes for node in nodes])

    def _written_over(self, born: list[fx.Node], dying: list[fx.Node]) -> list[fx.Node]:
        """What Inductor puts a pointwise result in the place of: inputs of its size that die.

        Of the graph's own inputs only what the forward saved, which AOTAutograd donates.
        """
        found: list[fx.Node] = []
        for node in born if dying else ():
            new = self._buffers[node]
            if not new.over:
                continue
            for dead in dying:
                old = self._buffers[dead]
                same = old.own and old.size_bytes == new.size_bytes
                if same and dead not in found and dead not in born:
                    found.append(dead)
                    break
        return found

    def _deaths(
        self, place: dict[fx.Node, int], birth: dict[fx.Node, int]
    ) -> dict[fx.Node, int]:
        """For every node that owns memory or feeds a kernel: the place of its last reader."""
        last = len(place) - 1
        runs: dict[fx.Node, int] = {}  # where the kernel of a node really runs
        death: dict[fx.Node, int] = {}
        held: dict[fx.Node, int] = {}  # inputs and outputs of collectives, until the wait
        for node, wait in self._held:
            held[node] = max(held.get(node, 0), place[wait])
        for node in reversed(place):
            if node.op == "output":
                continue
            buffer = self._buffers[node]
            ends = [runs.get(user, last) for user in buffer.users]
            runs[node] = max(ends) if buffer.inlined else birth[node]
            if buffer.owns:
                death[node] = max(birth[node], held.get(node, 0), *ends)
        for node in self._returned:
            death[node] = last
        return death


def memory_of(graph: fx.Graph) -> Memory:
    """Memory of an annotated graph in its order. See the module's docstring."""
    return MemoryModel(graph).run()


def returned_roots(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory the graph returns."""
    return {root_of(node) for node in output_nodes(graph)}


def kind_of(node: fx.Node, returned: bool) -> str:
    """What a buffer is, for people: one of :data:`KINDS`."""
    purpose = node.meta.get("collective")
    if node.target is UNPACK or node.meta.get("gathered"):
        return "gathered"
    if purpose is not None and purpose.gathers:
        return "gathered"
    if node.op == "placeholder":
        return "activations" if node.meta.get("saved") else "inputs"
    if is_collective(node) or any(is_collective(user) for user in effective_users(node)):
        return "communication"
    if returned and "gradient_of" in node.meta:
        return "gradients"
    return "activations"
