"""The timeline: one simulated graph as plain data, to keep, to draw and to look into.

What the simulator found out of a graph, without the graph: which kernel runs when, which
collective beside it, where the compute stream stands idle and what for, how much memory is
alive at every moment, and what the memory is made of where it is highest.

Needs: ``annotate``, and the :class:`~passes.simulate.simulator.Simulation` of the same graph.
Changes nothing, and holds no node, so that a graph is not kept alive by its timeline.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import WAIT, group_of, is_collective
from passes.graph.metadata import COLLECTIVE, GATHERED, INPUT, PARAMETER, SAVED
from passes.simulate.exposure import reasons
from passes.simulate.memory import kind_of, returned_roots
from passes.simulate.simulator import Simulation

COMPUTE = "compute"
NETWORK = "network"


@dataclasses.dataclass(frozen=True)
class Event:
    """A node while it runs. Seconds count from the start of the graph.

    ``name``: the node's. ``label``: the operator and the module it came from, or what a
    collective is for.
    ``stream``: :data:`COMPUTE`; or :data:`NETWORK`, and ``network 2`` and so on for the
    collectives of further process groups.
    ``exposed_seconds``: for how long the compute stream stood still for it. ``reason``: why,
    in words.
    ``serves``: the parameters that it reads, gathers, or makes the gradients of.
    """

    name: str
    label: str
    stream: str
    start_seconds: float
    end_seconds: float
    exposed_seconds: float = 0.0
    serves: tuple[str, ...] = ()
    reason: str = ""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True)
class Stall:
    """The compute stream standing idle; ``waits_for``, ``label``: the collective's."""

    waits_for: str
    label: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that is alive at the peak: a tensor, or a whole part of what is held all along.

    ``kind``: one of :data:`passes.simulate.memory.KINDS`, or the name of the part.
    ``is_part``: not one tensor, but all parameters, say.
    """

    name: str
    label: str
    kind: str
    size_bytes: int
    is_part: bool = False


def part_buffers(parts: Mapping[str, int]) -> list[Buffer]:
    """Bytes by part, such as the parameters', as buffers."""
    return [Buffer(part, f"all {part}", part, size, is_part=True) for part, size in parts.items()]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One graph's run on one rank.

    ``events``: in the order they start on each stream; on a stream none overlaps another.
    ``memory``: (seconds, bytes): from then on so many bytes are alive, the base included;
    of several changes at one moment each is there, in their order.
    ``base``: bytes by part (``parameters``, ``optimizer``, ``inputs``...) that are held
    during the whole graph.
    ``peak_buffers``: what is alive at the peak, the base's parts too, largest first; their
    bytes add up to ``peak_bytes``.
    ``peak_at``: the name of the node that runs then.
    """

    phase: str
    step_seconds: float
    events: tuple[Event, ...]
    stalls: tuple[Stall, ...]
    memory: tuple[tuple[float, int], ...]
    base: Mapping[str, int]
    peak_bytes: int
    peak_seconds: float
    peak_at: str
    peak_buffers: tuple[Buffer, ...]

    @property
    def compute_seconds(self) -> float:
        """Seconds the compute stream is at work."""
        return sum(event.seconds for event in self.events if event.stream == COMPUTE)

    @property
    def exposed_seconds(self) -> float:
        """Seconds the compute stream stands idle."""
        return sum(stall.seconds for stall in self.stalls)

    @property
    def base_bytes(self) -> int:
        return sum(self.base.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of its own that a graph leaves alive: what it returns and saves."""
        return self.memory[-1][1] - self.base_bytes

    def beside(self, held: Mapping[str, int]) -> Timeline:
        """The same graph while more is held beside it, bytes by part."""
        held = {part: size_bytes for part, size_bytes in held.items() if size_bytes}
        more_bytes = sum(held.values())
        base = {part: self.base.get(part, 0) + held.get(part, 0) for part in {**self.base, **held}}
        own = [
            buffer for buffer in self.peak_buffers if not (buffer.is_part and buffer.name in base)
        ]
        return dataclasses.replace(
            self,
            base=base,
            memory=tuple((seconds, alive + more_bytes) for seconds, alive in self.memory),
            peak_bytes=self.peak_bytes + more_bytes,
            peak_buffers=largest_first([*part_buffers(base), *own]),
        )


def timeline_of(
    graph: fx.Graph, simulation: Simulation, *, phase: str, base: Mapping[str, int] | None = None
) -> Timeline:
    """The timeline of an annotated graph that was simulated.

    Args:
        simulation: what :func:`passes.simulate.simulator.simulate` says of this graph, as it is
        now. phase: what the graph is called, such as ``"forward"``.
        base: bytes by part that the caller holds during the whole graph; parts of no bytes
            are left out.
    """
    held = {part: size_bytes for part, size_bytes in (base or {}).items() if size_bytes}
    base_bytes = sum(held.values())
    events: list[Event] = []
    stalls: list[Stall] = []
    memory: list[tuple[float, int]] = []
    exposed: dict[str, float] = {}
    now = 0.0  # on the compute stream, as in ``simulate``
    last: fx.Node | None = None  # the collective that ends last
    streams: dict[str, str] = {}  # by process group
    peak_seconds = 0.0
    peak_node = simulation.memory.peak_node
    for node, alive_bytes in zip(graph.nodes, simulation.memory.curve, strict=True):
        if node is peak_node:
            peak_seconds = now
        # The simulator meets one input after the other; all are there from the start.
        arriving = node.op == node.next.op == "placeholder" and node is not peak_node
        if not arriving and (not memory or memory[-1][1] != base_bytes + alive_bytes):
            memory.append((now, base_bytes + alive_bytes))
        start, end = simulation.start[node], simulation.end[node]
        if is_collective(node):
            last = node if last is None or end >= simulation.end[last] else last
            number = len(streams) + 1
            stream = streams.setdefault(
                group_of(node), NETWORK if number == 1 else f"{NETWORK} {number}"
            )
            if end > start:
                events.append(
                    Event(
                        node.name, label_of(node), stream, start, end, serves=cost_of(node).serves
                    )
                )
            busy_seconds = cost_of(node).busy_seconds
            if busy_seconds > 0:
                label = f"processor's share of {label_of(node)}"
                events.append(Event(node.name, label, COMPUTE, now, now + busy_seconds))
            now += busy_seconds
            continue
        if start > now:  # only a wait begins later than the stream is free
            source = node.args[0]
            assert node.target is WAIT and isinstance(source, fx.Node)
            stalls.append(Stall(source.name, label_of(source), now, start))
            exposed[source.name] = exposed.get(source.name, 0.0) + start - now
        if end > start:
            events.append(
                Event(node.name, label_of(node), COMPUTE, start, end, serves=cost_of(node).serves)
            )
        now = end
    if last is not None and simulation.step_seconds > now:
        stalls.append(Stall(last.name, label_of(last), now, simulation.step_seconds))
        exposed[last.name] = exposed.get(last.name, 0.0) + simulation.step_seconds - now
    ends = (simulation.step_seconds, base_bytes + simulation.memory.kept_bytes)
    if memory[-1] != ends:
        memory.append(ends)
    why = {node.name: reason.value for node, reason in reasons(simulation).items()}
    return Timeline(
        phase=phase,
        step_seconds=simulation.step_seconds,
        events=tuple(
            dataclasses.replace(
                event, exposed_seconds=exposed[event.name], reason=why.get(event.name, "")
            )
            if event.stream != COMPUTE and event.name in exposed
            else event
            for event in events
        ),
        stalls=tuple(stalls),
        memory=tuple(memory),
        base=held,
        peak_bytes=base_bytes + simulation.peak_bytes,
        peak_seconds=peak_seconds,
        peak_at=peak_node.name,
        peak_buffers=largest_first([*part_buffers(held), *_alive(graph, simulation)]),
    )


def _alive(graph: fx.Graph, simulation: Simulation) -> list[Buffer]:
    """The graph's own buffers at the peak; they add up to the simulation's peak."""
    memory = simulation.memory
    returned = returned_roots(graph)
    buffers = [
        Buffer(
            node.name, label_of(node), kind_of(node, node in returned), cost_of(node).memory_bytes
        )
        for node in memory.alive
    ]
    for start in memory.in_flight:
        copied_bytes = cost_of(start).workspace_bytes
        label = f"the backend's copy: {label_of(start)}"
        buffers.append(Buffer(f"{start.name} copy", label, "communication", copied_bytes))
    runs = memory.peak_node
    own_bytes = 0 if is_collective(runs) else cost_of(runs).workspace_bytes
    if own_bytes:
        label = f"workspace of {label_of(runs)}"
        buffers.append(Buffer(f"{runs.name} workspace", label, "workspace", own_bytes))
    return buffers


def largest_first(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """Sorted by bytes; by name where they are the same."""
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.size_bytes, buffer.name)))


_SELF = re.compile(r"^L\['\w+'\]\.?")


def label_of(node: fx.Node) -> str:
    """What a node is, for people: ``mm in blocks.0.up``, ``gather blocks.0.up.weight``."""
    purpose = node.meta.get(COLLECTIVE)
    if purpose is not None and is_collective(node):
        return str(purpose.label)
    module = _module_of(node)
    if node.op == "placeholder":
        if node.meta.get(PARAMETER):
            return str(node.meta[PARAMETER])
        if node.meta.get(GATHERED):
            return f"kept {node.meta['gathered']}"
        if node.meta.get(SAVED):
            return "saved for the backward" + (f" in {module}" if module else "")
        return str(node.meta.get(INPUT) or "input")
    return _operator(node) + (f" in {module}" if module else "")


def _operator(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.name
    target = node.target
    packet = getattr(target, "overloadpacket", None)  # of aten.sum.dim_IntList: aten.sum
    return str(getattr(packet or target, "__name__", target))


def _module_of(node: fx.Node) -> str:
    """The path of the module that a node was traced in; empty if nothing says so."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    innermost = next(reversed(stack.values()))
    return _SELF.sub("", str(innermost[0]))
