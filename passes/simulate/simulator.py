"""The simulator: time and memory of an annotated, ordered graph. The only estimate there is.

One compute stream runs the nodes in order; one network stream for each process group runs
its collectives in the order they are started, as NCCL's streams and gloo's queues do. A
wait stalls the compute stream until its collective has ended: that stall is *exposed*
communication. What a collective takes of the processor itself is added to the compute
stream where it starts, and on a busy machine one may come late (``passes/simulate/network.py``).
Memory: see ``passes/simulate/memory.py``.

Needs: ``annotate``. Changes nothing.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import WAIT, group_of, is_collective
from passes.simulate.memory import Memory, memory_of
from passes.simulate.network import Network


@dataclasses.dataclass
class Simulation:
    """One run of a graph on one rank.

    ``start``, ``end``: seconds by node (collectives on the network stream).
    ``exposed``: by collective, for how long its waits stall the compute stream.
    ``memory``: bytes alive while each node runs, and what they are.
    """

    start: dict[fx.Node, float]
    end: dict[fx.Node, float]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed: dict[fx.Node, float]
    memory: Memory

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes


def simulate(graph: fx.Graph, memory: Memory | None = None) -> Simulation:
    """Run an annotated graph. See the module's docstring.

    ``memory``: of this graph in this order, where it is known.
    """
    start: dict[fx.Node, float] = {}
    end: dict[fx.Node, float] = {}
    exposed: dict[fx.Node, float] = {}
    network = Network()
    compute = 0.0
    for node in graph.nodes:
        cost = cost_of(node)
        if is_collective(node):
            network.start(node, group_of(node), cost.seconds, cost.wake_seconds)
            exposed[node] = 0.0
            network.compute(cost.busy_seconds)
            compute += cost.busy_seconds
            continue
        if node.target is WAIT and isinstance(node.args[0], fx.Node) and node.args[0] in exposed:
            exposed[node.args[0]] += network.wait(node.args[0])
        start[node] = network.now
        network.compute(cost.seconds)
        compute += cost.seconds
        end[node] = network.now
    network.drain()
    start.update(network.starts)
    end.update(network.ends)
    step_seconds = network.now
    return Simulation(
        start=start,
        end=end,
        step_seconds=step_seconds,
        compute_seconds=compute,
        exposed_seconds=step_seconds - compute,
        exposed=exposed,
        memory=memory or memory_of(graph),
    )
