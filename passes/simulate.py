"""The simulator: time and memory of an annotated, ordered graph. The only estimate there is.

One compute stream runs the nodes in order; one network stream for each process group runs
its collectives in the order they are started, as NCCL's streams and gloo's queues do. A
wait stalls the compute stream until its collective has ended: that stall is *exposed*
communication. What a collective takes of the processor itself is added to the compute
stream where it starts.

Memory: a tensor is born at the node that writes it and dies after the last kernel that
reads it, views and in-place updates counted once. What lives only inside a fused kernel
takes none; what a fused kernel reads lives until that kernel runs, which is at its first
output that exists in memory. What a kernel allocates for itself is there while it runs. A
collective's input lives until its wait. Parameters and
everything else that the graph does not allocate are the caller's ``base_bytes``.

Needs: ``annotate``. Changes nothing.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from passes.annotate import cost_of
from passes.fusion import effective_users, is_fusible
from passes.graph import (
    WAIT,
    group_of,
    is_alias,
    is_collective,
    is_getitem,
    output_node,
    output_nodes,
    root_of,
)
from passes.packing import UNPACK

#: meta key of a placeholder whose memory is not the graph's: a parameter or a buffer.
STATIC = "static"

KINDS = ("activations", "gathered", "gradients", "communication", "inputs", "workspace")


@dataclasses.dataclass
class Simulation:
    """One run of a graph on one rank.

    ``start``, ``end``: seconds by node (collectives on the network stream).
    ``exposed``: by collective, for how long its waits stall the compute stream.
    ``curve``: bytes alive while each node runs, in the order of the graph.
    ``peak``: bytes alive at ``peak_node`` by kind, the base left out.
    ``kept``: bytes still alive at the end (the graph's outputs).
    """

    start: dict[fx.Node, float]
    end: dict[fx.Node, float]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed: dict[fx.Node, float]
    curve: list[int]
    peak_bytes: int
    peak_node: fx.Node
    peak: dict[str, int]
    kept_bytes: int


def simulate(graph: fx.Graph) -> Simulation:
    """Run an annotated graph. See the module's docstring."""
    start: dict[fx.Node, float] = {}
    end: dict[fx.Node, float] = {}
    exposed: dict[fx.Node, float] = {}
    now = compute = 0.0
    network_free: dict[str, float] = {}  # by group: when all that was started has ended
    for node in graph.nodes:
        seconds = cost_of(node).seconds
        if is_collective(node):
            group = group_of(node)
            start[node] = max(now, network_free.get(group, 0.0))
            end[node] = network_free[group] = start[node] + seconds
            exposed[node] = 0.0
            now += cost_of(node).busy_seconds
            compute += cost_of(node).busy_seconds
            continue
        if node.target is WAIT and isinstance(node.args[0], fx.Node) and node.args[0] in end:
            exposed[node.args[0]] += max(0.0, end[node.args[0]] - now)
            now = max(now, end[node.args[0]])
        start[node] = now
        now += seconds
        compute += seconds
        end[node] = now
    step_seconds = max(now, *network_free.values()) if network_free else now
    curve, peak_node, peak, kept_bytes = _memory(graph)
    return Simulation(
        start=start,
        end=end,
        step_seconds=step_seconds,
        compute_seconds=compute,
        exposed_seconds=step_seconds - compute,
        exposed=exposed,
        curve=curve,
        peak_bytes=max(curve, default=0),
        peak_node=peak_node,
        peak=peak,
        kept_bytes=kept_bytes,
    )


def _memory(graph: fx.Graph) -> tuple[list[int], fx.Node, dict[str, int], int]:
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    death, birth = deaths(graph, place), births(place)
    dying: list[list[fx.Node]] = [[] for _ in nodes]
    born_at = [0] * len(nodes)  # bytes
    for node, last in death.items():
        dying[last].append(node)
        born_at[birth[node]] += _born_bytes(node)
    alive_bytes = 0
    curve: list[int] = []
    best = 0
    written_over: dict[int, fx.Node] = {}  # the input that a node's result takes the place of
    for index, node in enumerate(nodes):
        born = born_at[index]
        # Inductor writes a pointwise result over an input of the same size that dies here.
        reused = 0
        if born and is_fusible(node):
            for dead in dying[index]:
                if dead.op == "call_function" and _born_bytes(dead) == born:
                    reused = born
                    written_over[index] = dead
                    break
        alive_bytes += born
        curve.append(alive_bytes - reused + cost_of(node).workspace_bytes)
        for dead in dying[index]:
            alive_bytes -= _born_bytes(dead)
        if curve[-1] > curve[best]:
            best = index
    peak = dict.fromkeys(KINDS, 0)
    returned = {root_of(node) for node in output_nodes(graph)}
    for node, last in death.items():
        if birth[node] <= best <= last and node is not written_over.get(best):
            peak[kind_of(node, node in returned)] += _born_bytes(node)
    peak["workspace"] = cost_of(nodes[best]).workspace_bytes
    kept = sum(_born_bytes(node) for node, last in death.items() if last == len(nodes) - 1)
    return curve, nodes[best], {k: v for k, v in peak.items() if v}, kept


def _born_bytes(node: fx.Node) -> int:
    return 0 if node.meta.get(STATIC) else cost_of(node).memory_bytes


def births(place: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For every node: the place of the kernel that allocates it; all results of one are there."""
    return {
        node: place[node.args[0]]  # type: ignore[index]
        if is_getitem(node) and not is_fusible(node)
        else index
        for node, index in place.items()
    }


def deaths(graph: fx.Graph, place: dict[fx.Node, int]) -> dict[fx.Node, int]:
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
        runs[node] = max(runs.get(user, last) for user in users) if inlined else place[node]
        if is_alias(node):
            continue
        ends = [runs.get(user, last) for user in users]
        death[node] = max([place[node], held.get(node, 0), *ends])
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
