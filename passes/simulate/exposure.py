"""Exposure: the reason why a collective stalls the compute stream in a simulation.

An earlier start can shorten a stall only if the network is idle before it. So:

- If the network's idle time before the collective is less than half of the stall, no compute is
  left to hide behind.
- Otherwise the reason is that of the collective after the longest idle time: its input was not
  ready, or ``reorder`` held it back.

Needs: ``reorder`` (``HELD_BACK``, ``DRAINED``) and a simulation of the same graph.
Leaves: the graph unchanged.
"""

from __future__ import annotations

from torch import fx

from passes.graph.fx_utils import group_of, is_alias, is_packing
from passes.graph.metadata import DRAINED, HELD_BACK
from passes.simulate.simulator import Simulation
from passes.types.annotations import Reason


def reasons(simulation: Simulation) -> dict[fx.Node, Reason]:
    """The reason of every collective that stalls the compute stream."""
    found: dict[fx.Node, Reason] = {}
    by_group: dict[str, list[fx.Node]] = {}
    for node in simulation.exposed:
        by_group.setdefault(group_of(node), []).append(node)
    for nodes in by_group.values():
        idle_seconds = longest_seconds = free = 0.0
        after_longest: fx.Node | None = None
        for node in sorted(nodes, key=simulation.start.__getitem__):
            gap_seconds = simulation.start[node] - free
            free = simulation.end[node]
            idle_seconds += gap_seconds
            if after_longest is None or gap_seconds > longest_seconds:
                longest_seconds, after_longest = gap_seconds, node
            stall_seconds = simulation.exposed[node]
            if stall_seconds <= 0:
                continue
            if DRAINED.get(node):
                found[node] = Reason.MEMORY
            elif idle_seconds < stall_seconds / 2:
                found[node] = Reason.NO_COMPUTE
            else:
                found[node] = _why_not_earlier(after_longest, longest_seconds, simulation)
    return found


def _why_not_earlier(node: fx.Node, idle_seconds: float, simulation: Simulation) -> Reason:
    """The reason why a collective did not start during the network's idle time before it."""
    there = max((simulation.end[source] for source in _sent(node)), default=0.0)
    if simulation.start[node] - there < idle_seconds / 2:
        return Reason.DEPENDENCY
    return HELD_BACK.get(node, Reason.ORDER)


def _sent(start: fx.Node) -> list[fx.Node]:
    """The kernels that compute the input of a collective. Skips views and packing copies."""
    found: dict[fx.Node, None] = {}
    stack = list(start.all_input_nodes)
    while stack:
        node = stack.pop()
        if is_alias(node) or is_packing(node):
            stack.extend(node.all_input_nodes)
        elif node.op == "call_function":
            found[node] = None
    return list(found)
