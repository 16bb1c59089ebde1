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
    output_node,
    output_nodes,
    positions,
    root_of,
)
from passes.kernels import kernel_places
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


def memory_of(graph: fx.Graph) -> Memory:
    """Run an annotated graph. See the module's docstring."""
    place = positions(graph)
    nodes = list(place)
    birth = kernel_places(place)
    death = _deaths(graph, place, birth)
    dying: list[list[fx.Node]] = [[] for _ in nodes]
    born: list[list[fx.Node]] = [[] for _ in nodes]
    for node, last in death.items():
        dying[last].append(node)
        born[birth[node]].append(node)
    alive_bytes = 0
    curve: list[int] = []
    best = 0
    over: list[fx.Node] = []  # what is written over at the peak
    for index, node in enumerate(nodes):
        replaced = _written_over(born[index], dying[index])
        alive_bytes += sum(map(_born_bytes, born[index]))
        curve.append(alive_bytes - sum(map(_born_bytes, replaced)) + cost_of(node).workspace_bytes)
        alive_bytes -= sum(map(_born_bytes, dying[index]))
        if curve[-1] > curve[best]:
            best = index
        if best == index:
            over = replaced
    alive = [
        node
        for node, last in death.items()
        if birth[node] <= best <= last and _born_bytes(node) and node not in over
    ]
    peak = dict.fromkeys(KINDS, 0)
    returned = returned_roots(graph)
    for node in alive:
        peak[kind_of(node, node in returned)] += _born_bytes(node)
    peak["workspace"] = cost_of(nodes[best]).workspace_bytes
    kept = sum(_born_bytes(node) for node, last in death.items() if last == len(nodes) - 1)
    return Memory(curve, nodes[best], alive, {k: v for k, v in peak.items() if v}, kept)


def _written_over(born: list[fx.Node], dying: list[fx.Node]) -> list[fx.Node]:
    """What Inductor puts a pointwise result in the place of: inputs of its size that die.

    Of the graph's own inputs only what the forward saved, which AOTAutograd donates.
    """
    found: list[fx.Node] = []
    for node in born:
        if not is_fusible(node) or not _born_bytes(node):
            continue
        for dead in dying:
            own = dead.op == "call_function" or dead.meta.get("saved", False)
            same = _born_bytes(dead) == _born_bytes(node)
            if own and same and dead not in found and dead not in born:
                found.append(dead)
                break
    return found


def _born_bytes(node: fx.Node) -> int:
    return 0 if node.meta.get(STATIC) else cost_of(node).memory_bytes


def returned_roots(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory the graph returns."""
    return {root_of(node) for node in output_nodes(graph)}


def _deaths(
    graph: fx.Graph, place: dict[fx.Node, int], birth: dict[fx.Node, int]
) -> dict[fx.Node, int]:
    """For every node that owns memory or feeds a kernel: the place of its last reader."""
    last = len(place) - 1
    runs: dict[fx.Node, int] = {}  # where the kernel of a node really runs
    death: dict[fx.Node, int] = {}
    held: dict[fx.Node, int] = {}  # inputs and outputs of collectives, until the wait
    for node in graph.nodes:
        if node.target is WAIT and isinstance(node.args[0], fx.Node):
            start = node.args[0]
            if is_collective(start):
                source = root_of(start.args[0])  # type: ignore[arg-type]
                held[source] = max(held.get(source, 0), place[node])
                held[start] = place[node]
    for node in reversed(list(graph.nodes)):
        if node.op == "output":
            continue
        users = effective_users(node)
        inlined = is_fusible(node) and cost_of(node).memory_bytes == 0 and users
        runs[node] = max(runs.get(user, last) for user in users) if inlined else birth[node]
        if is_alias(node):
            continue
        ends = [runs.get(user, last) for user in users]
        death[node] = max([birth[node], held.get(node, 0), *ends])
    for node in output_node(graph).all_input_nodes:
        death[root_of(node)] = last
    return death


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
