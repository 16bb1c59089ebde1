"""The simulator: time and memory of an annotated, ordered graph.

It is the only estimate in this package: the planner, ``reorder`` and the report all use it.

One compute stream runs the nodes in order. One network stream per process group runs its
collectives in their start order, like NCCL's streams and gloo's queues. A wait stalls the compute
stream until its collective has ended: this stall is *exposed* communication. A collective of the
model itself is on the stream of its group too, and compute waits for it at once. The compute
overhead of a collective (``compute_overhead_seconds``) is added to the compute stream at its start.
A collective may also have a start delay and a lateness (``passes/simulate/network.py``). Memory:
``passes/simulate/memory.py``.

Needs: ``annotate``. Leaves: the graph unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import WAIT, group_of, is_collective, is_model_collective
from passes.simulate.memory import memory_of
from passes.simulate.network import Network
from passes.types.annotations import Memory


@dataclasses.dataclass
class Simulation:
    """One run of a graph on one rank.

    ``start``, ``end``: seconds by node; for collectives on the network stream.
    ``compute_seconds``: time of the compute stream without stalls.
    ``exposed_seconds``: all stalls of the compute stream.
    ``exposed``: by collective, the stall of its waits in seconds.
    ``of_model``: by collective of the model itself, the stall until its end in seconds.
    ``idle_seconds``: at the end, the time since a collective ended.
    ``memory``: bytes alive while each node runs, and their kinds at the peak.
    """

    start: dict[fx.Node, float]
    end: dict[fx.Node, float]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed: dict[fx.Node, float]
    of_model: dict[fx.Node, float]
    idle_seconds: float
    memory: Memory

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @property
    def model_seconds(self) -> float:
        """The stalls because of the model's own collectives, a part of all stalls."""
        return sum(self.of_model.values())


def simulate(
    graph: fx.Graph, memory: Memory | None = None, idle_seconds: float = 0.0
) -> Simulation:
    """Simulate an annotated graph. See the module's docstring.

    ``memory``: the known memory of this graph in this order; None: compute it.
    ``idle_seconds``: at the begin, the time since a collective ended.
    """
    start: dict[fx.Node, float] = {}
    end: dict[fx.Node, float] = {}
    exposed: dict[fx.Node, float] = {}
    of_model: dict[fx.Node, float] = {}
    network = Network(idle_seconds)
    compute = 0.0
    for node in graph.nodes:
        cost = cost_of(node)
        if is_collective(node):
            network.start(
                node,
                group_of(node),
                cost.seconds,
                cost.start_delay_seconds,
                cost.lateness,
            )
            exposed[node] = 0.0
            network.compute(cost.compute_overhead_seconds)
            compute += cost.compute_overhead_seconds
            continue
        if is_model_collective(node):
            network.start(
                node,
                group_of(node),
                cost.seconds,
                lateness=cost.lateness,
                beside=cost.beside,
            )
            of_model[node] = network.wait(node)
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
        of_model=of_model,
        idle_seconds=network.idle_seconds,
        memory=memory or memory_of(graph),
    )


def idle_after(runs: Sequence[Simulation]) -> float:
    """The seconds since a collective ended, at the end of graphs that run one after the other."""
    return runs[-1].idle_seconds if runs else 0.0
