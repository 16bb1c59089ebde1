"""Memory: what is alive while each node of an annotated, ordered graph runs.

A tensor is born with the kernel that writes it (``passes/kernels.py``) and dies after the last
kernel that reads it, views and in-place updates counted once. What lives only inside a fused
kernel takes none. What a kernel allocates for itself is there while it runs. A collective's
input lives until its wait. Parameters and everything else that the graph does not allocate are
the caller's ``base_bytes``.

On a CPU Inductor makes one C++ function of all fused kernels between two operators that are not
(``torch._inductor.scheduler.Scheduler._codegen`` frees where it flushes): what they read dies with
the last of them, but for what one is written over.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from passes.annotate import cost_of
from passes.fusion import effective_users, is_fusible, is_reduction
from passes.graph import (
    WAIT,
    is_alias,
    is_collective,
    is_getitem,
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
    ``part``: its kernel is a part of a function.
    """

    size_bytes: int
    users: tuple[fx.Node, ...]
    inlined: bool
    owns: bool
    over: bool
    own: bool
    part: bool


class MemoryModel:
    """The memory of an annotated graph, for any order that its nodes are put in."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._kernels = Kernels(graph.nodes)
        self._buffers: dict[fx.Node, _Buffer] = {}
        self._held: list[tuple[fx.Node, fx.Node]] = []  # and the wait until which
        self._ends_functions: set[fx.Node] = set()
        self._needed: dict[tuple[fx.Node, fx.Node], bool] = {}
        self._returned = returned_roots(graph)
        for node in graph.nodes:
            if node.op == "output":
                continue
            size_bytes = 0 if node.meta.get(STATIC) else cost_of(node).memory_bytes
            users, fusible = tuple(effective_users(node)), is_fusible(node)
            self._buffers[node] = _Buffer(
                size_bytes,
                users,
                inlined=fusible and size_bytes == 0 and bool(users) and not is_reduction(node),
                owns=not is_alias(node),
                over=fusible and size_bytes > 0,
                own=node.op == "call_function" or bool(node.meta.get("saved", False)),
                part=cost_of(node).in_function and cost_of(node).memory_bytes > 0,
            )
            if _ends_functions(node):
                self._ends_functions.add(node)
            if node.target is WAIT and isinstance(node.args[0], fx.Node):
                start = node.args[0]
                if is_collective(start):
                    source = root_of(start.args[0])  # type: ignore[arg-type]
                    self._held += [(source, node), (start, node)]
        self._number = {node: index for index, node in enumerate(graph.nodes)}
        # Who reads a tensor, those who live only inside others' kernels looked through.
        self._readers: dict[fx.Node, dict[fx.Node, None]] = {}
        for node in reversed(self._buffers):
            found: dict[fx.Node, None] = {}
            for user in self._buffers[node].users:
                inside = user in self._buffers and self._buffers[user].inlined
                found.update(self._readers[user] if inside else {user: None})
            self._readers[node] = found

    def run(self) -> Memory:
        """Memory in the order that the nodes have now. See the module's docstring."""
        place = positions(self._graph)
        nodes = list(place)
        birth = self._kernels.places(place)
        death = self._deaths(place, birth)
        freed = self._function_ends(nodes, birth)
        dying: list[list[fx.Node]] = [[] for _ in nodes]
        born: list[list[fx.Node]] = [[] for _ in nodes]
        freed_at: list[list[fx.Node]] = [[] for _ in nodes]
        for node, last in death.items():
            if self._buffers[node].size_bytes:
                dying[last].append(node)
                born[birth[node]].append(node)
        alive_bytes = 0
        curve: list[int] = []
        best = 0
        over: list[fx.Node] = []  # what is written over at the peak
        for index, node in enumerate(nodes):
            replaced = self._written_over(born[index], dying[index], birth)
            alive_bytes += self._sum(born[index]) - self._sum(replaced)
            curve.append(alive_bytes + cost_of(node).workspace_bytes)
            for dead in dying[index]:
                if dead not in replaced:
                    death[dead] = freed[index]
                    freed_at[freed[index]].append(dead)
            alive_bytes -= self._sum(freed_at[index])
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

    def _function_ends(self, nodes: list[fx.Node], birth: dict[fx.Node, int]) -> list[int]:
        """For every place the last one of its function; its own if it is in none."""
        parts = {birth[node] for node, buffer in self._buffers.items() if buffer.part}
        ends = list(range(len(nodes)))
        last: int | None = None
        for index in reversed(range(len(nodes))):
            if nodes[index] in self._ends_functions:
                last = None
            elif index in parts:
                last = index if last is None else last
                ends[index] = last
        return ends

    def _sum(self, nodes: list[fx.Node]) -> int:
        return sum([self._buffers[node].size_bytes for node in nodes])

    def _written_over(
        self, born: list[fx.Node], dying: list[fx.Node], birth: dict[fx.Node, int]
    ) -> list[fx.Node]:
        """What Inductor puts a pointwise result in the place of: inputs of its size that die.

        Of the graph's own inputs only what the forward saved, which AOTAutograd donates. Nothing
        that the kernel reads for another result, unless that one is needed for this result
        (``torch._inductor.scheduler.BaseSchedulerNode.decide_inplace_update``).
        """
        found: list[fx.Node] = []
        for node in born if dying else ():
            new = self._buffers[node]
            if not new.over:
                continue
            for dead in dying:
                old = self._buffers[dead]
                same = old.own and old.size_bytes == new.size_bytes
                if not same or dead in found or dead in born:
                    continue
                others = [r for r in self._readers[dead] if birth.get(r) == birth[node]]
                if node in others and all(r is node or self._needs(node, r) for r in others):
                    found.append(dead)
                    break
        return found

    def _needs(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether a node is computed of another, directly or not."""
        key = (node, other)
        if key not in self._needed:
            first, stack, seen = self._number[other], [node], {node}
            while stack and other not in seen:
                for source in stack.pop().all_input_nodes:
                    if self._number[source] >= first and source not in seen:
                        seen.add(source)
                        stack.append(source)
            self._needed[key] = other in seen
        return self._needed[key]

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


def _ends_functions(node: fx.Node) -> bool:
    """Whether a node is called from outside of C++ functions: it is neither fused nor a view."""
    return (
        node.op == "call_function"
        and not (is_fusible(node) or is_getitem(node))
        and (node.target is WAIT or is_collective(node) or not is_alias(node))
    )


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
