"""The timeline: the simulation of one graph as plain data, for reports and traces.

A timeline has the kernels and collectives with their times, the stalls of the compute stream with
their causes, the memory over time, and the buffers alive at the peak.

Needs: ``annotate``, and the :class:`~passes.simulate.simulator.Simulation` of the same graph.
Leaves: the graph unchanged. A timeline refers to no node, so it does not keep the graph alive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import WAIT, group_of, is_collective, is_model_collective
from passes.graph.metadata import COLLECTIVE, GATHERED, INPUT, PARAMETER, SAVED
from passes.graph.module_path import module_path
from passes.ops.markers import LEFT_OUT
from passes.simulate.exposure import reasons
from passes.simulate.memory import COPY, WORKSPACE, Life, lives_of
from passes.simulate.simulator import Simulation
from passes.types.annotations import Reason

COMPUTE = "compute"
NETWORK = "network"


@dataclasses.dataclass(frozen=True)
class Event:
    """The run of one node. Seconds count from the start of the graph.

    ``name``: the node's name.
    ``label``: the operator and its module; for a collective its purpose.
    ``stream``: :data:`COMPUTE`; or :data:`NETWORK`, ``network 2`` and so on for the collectives
    of each process group.
    ``exposed_seconds``: the stall of the compute stream because of this collective.
    ``reason``: the cause of that stall, in words.
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
    """An idle time of the compute stream.

    ``waits_for``, ``label``: name and label of the collective that it waits for.
    """

    waits_for: str
    label: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that is alive at the peak: one tensor, or a whole part of the base.

    ``kind``: one of :data:`passes.simulate.memory.KINDS`, or the name of the part.
    ``is_part``: a part, such as all parameters, and not one tensor.
    """

    name: str
    label: str
    kind: str
    size_bytes: int
    is_part: bool = False


class Lived(NamedTuple):
    """A buffer of the graph's own, and its first and last place, both included."""

    buffer: Buffer
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Equal layers that the graph lacks (``passes/capture/fold_layers.py``), and their time.

    ``name``: of their event, and of the stall because of their collectives.
    ``reason``: the cause of that stall, in words.
    ``first``, ``last``: the places of the nodes that stand for them; they run after these.
    """

    name: str
    label: str
    reason: str
    layers: int
    first: int
    last: int
    start_seconds: float
    end_seconds: float


def part_buffers(parts: Mapping[str, int]) -> list[Buffer]:
    """One buffer for each part of the base. ``parts``: bytes by part."""
    return [Buffer(part, f"all {part}", part, size, is_part=True) for part, size in parts.items()]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One run of a graph on one rank.

    ``events``: sorted by start on each stream; events of one stream do not overlap.
    ``memory``: pairs (seconds, bytes): the bytes alive from this time on, base included. Several
    changes at one time are all there, in their order.
    ``base``: bytes by part (``parameters``, ``optimizer``, ``inputs``...) that the caller holds
    during the whole graph.
    ``peak_buffers``: the buffers alive at the peak, largest first, the parts of the base included.
    Their bytes add up to ``peak_bytes``.
    ``peak_at``: the name of the node that runs at the peak.
    ``places_seconds``: by place in the graph, the time of the compute stream.
    ``lives``: the graph's own buffers. At each place they and the base add up to the memory.
    ``left_out``: layers that the graph lacks and the times include.
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
    places_seconds: tuple[float, ...] = ()
    lives: tuple[Lived, ...] = ()
    left_out: LeftOut | None = None

    @property
    def compute_seconds(self) -> float:
        """Busy time of the compute stream."""
        return sum(event.seconds for event in self.events if event.stream == COMPUTE)

    @property
    def exposed_seconds(self) -> float:
        """Idle time of the compute stream."""
        return sum(stall.seconds for stall in self.stalls)

    @property
    def base_bytes(self) -> int:
        return sum(self.base.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the graph's own that stay alive after it: returned and saved tensors."""
        return self.memory[-1][1] - self.base_bytes

    def beside(self, held: Mapping[str, int]) -> Timeline:
        """The timeline with more memory in the base. ``held``: additional bytes by part."""
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
    """The timeline of an annotated graph.

    Args:
        simulation: the result of :func:`passes.simulate.simulator.simulate` for this graph in its
            current order.
        phase: the name of the graph, such as ``"forward"``.
        base: bytes by part that the caller holds during the whole graph. Empty parts are dropped.
    """
    held = {part: size_bytes for part, size_bytes in (base or {}).items() if size_bytes}
    base_bytes = sum(held.values())
    memory: list[tuple[float, int]] = []
    now = 0.0  # time of the compute stream, as in ``simulate``
    peak_seconds, peak_place = 0.0, 0
    peak_node = simulation.memory.peak_node
    streams = _Streams(simulation)
    places: list[float] = []
    for node, alive_bytes in zip(graph.nodes, simulation.memory.curve, strict=True):
        if node is peak_node:
            peak_seconds, peak_place = now, len(places)
        places.append(now)
        # The simulator sees the inputs one by one, but all are alive from the start.
        arriving = node.op == node.next.op == "placeholder" and node is not peak_node
        if not arriving and (not memory or memory[-1][1] != base_bytes + alive_bytes):
            memory.append((now, base_bytes + alive_bytes))
        now = streams.run(node, now)
    streams.end(now)
    ends = (simulation.step_seconds, base_bytes + simulation.memory.kept_bytes)
    if memory[-1] != ends:
        memory.append(ends)
    lives = tuple(_lived(life) for life in lives_of(graph))
    alive = [life.buffer for life in lives if life.first <= peak_place <= life.last]
    return Timeline(
        phase=phase,
        step_seconds=simulation.step_seconds,
        events=streams.explained_events(),
        stalls=tuple(streams.stalls),
        memory=tuple(memory),
        base=held,
        peak_bytes=base_bytes + simulation.peak_bytes,
        peak_seconds=peak_seconds,
        peak_at=peak_node.name,
        peak_buffers=largest_first([*part_buffers(held), *alive]),
        places_seconds=tuple(places),
        lives=lives,
    )


class _Streams:
    """The events of all streams and the stalls of compute, recorded node by node."""

    def __init__(self, simulation: Simulation) -> None:
        self.stalls: list[Stall] = []
        self._simulation = simulation
        self._events: list[Event] = []
        self._exposed_seconds: dict[str, float] = {}  # by collective
        self._names: dict[str, str] = {}  # of network streams, by process group
        self._last: fx.Node | None = None  # the collective with the latest end

    def run(self, node: fx.Node, now: float) -> float:
        """Record a node. Returns the time of the compute stream after it."""
        if is_collective(node):
            return self.communicate(node, now)
        if is_model_collective(node):
            self.communicate(node, now)
            end = self._simulation.end[node]
            if end > now:
                self._stall(node, now, end)
            return end
        return self.compute(node, now)

    def communicate(self, node: fx.Node, now: float) -> float:
        """Record a collective. Returns the time of the compute stream after its start."""
        start, end = self._simulation.start[node], self._simulation.end[node]
        if self._last is None or end >= self._simulation.end[self._last]:
            self._last = node
        number = len(self._names) + 1
        stream = self._names.setdefault(
            group_of(node), NETWORK if number == 1 else f"{NETWORK} {number}"
        )
        cost = cost_of(node)
        if end > start:
            self._events.append(
                Event(node.name, label_of(node), stream, start, end, serves=cost.serves)
            )
        computed = now + cost.compute_overhead_seconds
        if cost.compute_overhead_seconds > 0:
            label = f"processor's share of {label_of(node)}"
            self._events.append(Event(node.name, label, COMPUTE, now, computed))
        return computed

    def compute(self, node: fx.Node, now: float) -> float:
        """Record a kernel, and the stall before it. Returns the time of the compute stream."""
        start, end = self._simulation.start[node], self._simulation.end[node]
        if start > now:  # only a wait begins after the stream is free
            source = node.args[0]
            assert node.target is WAIT and isinstance(source, fx.Node)
            self._stall(source, now, start)
        if end > start:
            serves = cost_of(node).serves
            self._events.append(
                Event(node.name, label_of(node), COMPUTE, start, end, serves=serves)
            )
        return end

    def end(self, now: float) -> None:
        """Record the stall between the end of compute and the end of the step."""
        if self._last is not None and self._simulation.step_seconds > now:
            self._stall(self._last, now, self._simulation.step_seconds)

    def _stall(self, collective: fx.Node, start: float, end: float) -> None:
        name, exposed = collective.name, self._exposed_seconds
        self.stalls.append(Stall(name, label_of(collective), start, end))
        exposed[name] = exposed.get(name, 0.0) + end - start

    def explained_events(self) -> tuple[Event, ...]:
        """The events; an exposed collective has its exposed seconds and their cause."""
        exposed = self._exposed_seconds
        why = {node.name: reason.value for node, reason in reasons(self._simulation).items()}
        why |= {node.name: Reason.OF_MODEL.value for node in self._simulation.of_model}
        return tuple(
            dataclasses.replace(
                event, exposed_seconds=exposed[event.name], reason=why.get(event.name, "")
            )
            if event.stream != COMPUTE and event.name in exposed
            else event
            for event in self._events
        )


def _lived(life: Life) -> Lived:
    name, label = life.node.name, label_of(life.node)
    if life.part == COPY:
        name, label = f"{name} copy", f"the backend's copy: {label}"
    elif life.part == WORKSPACE:
        name, label = f"{name} workspace", f"workspace of {label}"
    return Lived(Buffer(name, label, life.kind, life.size_bytes), life.first, life.last)


def largest_first(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """Sort buffers by bytes, descending; by name on a tie."""
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.size_bytes, buffer.name)))


def label_of(node: fx.Node) -> str:
    """A label of a node for users: ``mm in blocks.0.up``, ``gather blocks.0.up.weight``."""
    purpose = COLLECTIVE.get(node)
    if purpose is not None and is_collective(node):
        return purpose.label
    if node.target is LEFT_OUT:
        return "the layers left out"
    module = module_path(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))
    if node.op == "placeholder":
        if name := PARAMETER.get(node):
            return name
        if name := GATHERED.get(node):
            return f"kept {name}"
        if SAVED.get(node):
            return "saved for the backward" + (f" in {module}" if module else "")
        return INPUT.get(node) or "input"
    return _operator(node) + (f" in {module}" if module else "")


def _operator(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.name
    target = node.target
    packet = getattr(target, "overloadpacket", None)  # aten.sum for aten.sum.dim_IntList
    return str(getattr(packet or target, "__name__", target))
