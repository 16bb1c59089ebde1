"""Schedule: in what order the nodes of a graph run, collectives beside compute.

See ``passes/reorder.py``, which decides under what cap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import fx

from passes.annotate import cost_of
from passes.check import InvalidGraph
from passes.decisions import Collective
from passes.exposure import Reason
from passes.network import Network

#: A gather is urgent once the time left before its use is below this many times its own.
_URGENT = 1.5
#: All collectives of a graph are on one group.
_QUEUE = ""


@dataclasses.dataclass(eq=False)
class Job:
    """One collective: what must run before it starts, itself, and what follows its wait.

    ``bytes``: of the whole tensor, for the plan's in-flight limit.
    ``extra_bytes``: what is alive longer if a gather starts early, or a reduction is waited for
    late, than if each happened on the spot.
    """

    before: list[fx.Node]
    start: fx.Node
    wait: fx.Node
    after: list[fx.Node]
    gathers: bool
    bytes: int
    extra_bytes: int
    first_use: fx.Node

    @property
    def purpose(self) -> Collective:
        """What the collective is for."""
        purpose: Collective = self.start.meta["collective"]
        return purpose


class Room:
    """Bytes that may be alive besides, at each compute node. Below zero there is none."""

    def __init__(self, free_bytes: Sequence[int]) -> None:
        self._free = np.array(free_bytes, dtype=np.int64)

    def at(self, place: int) -> int:
        """What is left at one node."""
        return int(self._free[place])

    def least(self, start: int, end: int) -> int:
        """What is left at all nodes from one to before another; plenty if there is none."""
        return int(self._free[start:end].min()) if start < end else _PLENTY

    def take(self, size_bytes: int, start: int, end: int) -> None:
        """Take from all nodes from one to before another."""
        self._free[start:end] -= size_bytes


class Scheduler:
    """Walks the compute nodes with two clocks, of the compute and of the network."""

    def __init__(
        self,
        original: list[fx.Node],
        jobs: list[Job],
        cap_bytes: int,
        seconds: Callable[[fx.Node], float],
        sequence: list[Job] | None = None,
        room: Room | None = None,
    ) -> None:
        """
        Args:
            original: all nodes, in the order they have.
            cap_bytes: the most that may be gathered ahead of its use, and the most of gradients
                that may wait for their reduction.
            seconds: what a compute node takes.
            sequence: the order in which the collectives must start (None: the best found).
            room: what may be alive besides, at each compute node (None: whatever it takes).
        """
        mine = moved(jobs)
        self.compute = [node for node in original if is_compute(node, mine)]
        self.cap_bytes, self.seconds, self.sequence = cap_bytes, seconds, sequence
        self.room = room
        self.place = {node: index for index, node in enumerate(self.compute)}
        self.at = 0  # the place of the compute node that runs next
        order = {node: index for index, node in enumerate(original)}
        self.gathers = sorted(
            (job for job in jobs if job.gathers),
            key=lambda job: (order[job.first_use], order[job.start]),
        )
        self.used_at: dict[fx.Node, list[Job]] = {}
        for job in [*self.gathers, *(job for job in jobs if not job.gathers)]:
            self.used_at.setdefault(job.first_use, []).append(job)
        self.ready_at: dict[fx.Node | None, list[Job]] = {}
        for job in jobs:
            if not job.gathers:
                self.ready_at.setdefault(_ready_after(job, mine, order), []).append(job)
        # When each compute node would start if nothing ever stalled.
        self.stall_free: dict[fx.Node, float] = {}
        self.finish_seconds = 0.0
        for node in self.compute:
            self.stall_free[node] = self.finish_seconds
            self.finish_seconds += seconds(node)

        self.result = [n for n in original if n.op == "placeholder"]
        self.placed: set[fx.Node] = set()
        self.network = Network()
        self.started: set[Job] = set()
        self.stalled = 0.0  # in all, so far
        # Kept waiting while the network was idle, by the cap or for want of room (the last of
        # the two); and waited for early, for want of room.
        self.held_back: dict[Job, Reason] = {}
        self.drained: dict[Job, None] = {}
        self.ahead: dict[Job, None] = {}  # gathers started and not waited for
        self.flying: list[Job] = []  # reductions started and not waited for
        self.pending = list(self.ready_at.get(None, ()))  # reductions that may start
        self.next_gather = 0
        self.in_line = iter(sequence or ())
        self.head = next(self.in_line, None)

    def run(self) -> list[fx.Node]:
        """The new order of all nodes but the output.

        Raises:
            InvalidGraph: if the graph cannot follow the given sequence.
        """
        for place, node in enumerate(self.compute):
            self.at = place
            for job in self.used_at.get(node, ()):
                self.start_now(job)
                self.wait_for(job)
            # Keep the network busy while this node runs.
            while self.network.free_seconds(_QUEUE) <= self.network.now + self.seconds(node):
                if not (self.start_best() if self.sequence is None else self.start_next()):
                    break
            self.result.append(node)
            self.network.compute(self.seconds(node))
            self.after(node)
        for job in self.sequence or [*self.gathers, *self.pending]:
            self.start_now(job)
        for job in self.gathers:
            self.wait_for(job)
        for job in list(self.flying):
            self.wait_for(job)
        return self.result

    def after(self, node: fx.Node) -> None:
        """What a node's end brings: gradients to reduce, and reductions that have ended."""
        for job in self.ready_at.get(node, ()):
            self.pending.append(job)
            if self.cap_bytes == 0 and self.sequence is None:
                self.start_now(job)
                self.wait_for(job)
        while self.cap_bytes == 0 and self.head is not None and self.head in self.pending:
            job, self.head = self.head, next(self.in_line, None)
            self.begin(job)
            self.wait_for(job)
        while self.flying and self.flying[0].start in self.network.ends:
            self.wait_for(self.flying[0])
        # Gradients that wait in line take memory too: above the cap, stall for the oldest.
        while self.flying and _bytes(self.flying) + _bytes(self.pending) > self.cap_bytes:
            self.wait_for(self.flying[0])
        while self.is_short(self.at + 1):
            oldest = next((one for one in self.flying if one.extra_bytes), None)
            if oldest is not None:
                self.drained[oldest] = None
                self.wait_for(oldest)
            elif not self.start_pending():
                break

    def is_short(self, place: int) -> bool:
        """Whether the gradients on their way take more than there is room for at a node."""
        if self.room is None or place >= len(self.compute):
            return False
        return self.held_bytes() > max(0, self.room.at(place))

    def held_bytes(self) -> int:
        """What the gradients on their way, or in line, keep alive for longer than on the spot."""
        return sum(job.extra_bytes for job in (*self.flying, *self.pending))

    def start_pending(self) -> bool:
        """Start the gradient that is first in line, if one may start."""
        first = next(iter(self.pending), None) if self.sequence is None else self.head
        if first is None or first not in self.pending:
            return False
        self.start_now(first)
        return True

    def begin(self, job: Job) -> None:
        """Start a collective."""
        self.result.extend(node for node in job.before if node not in self.placed)
        self.placed.update(job.before)
        self.result.append(job.start)
        self.started.add(job)
        cost = cost_of(job.start)
        self.network.start(job.start, _QUEUE, cost.seconds, cost.wake_seconds)
        self.network.compute(cost.busy_seconds)
        if job.gathers:
            self.next_gather += 1
            self.ahead[job] = None
            if self.room is not None:
                self.room.take(job.extra_bytes, self.at, self.used(job))
        else:
            self.pending.remove(job)
            self.flying.append(job)

    def wait_for(self, job: Job) -> None:
        """Wait for a collective, unless that was done already."""
        if job not in self.ahead and job not in self.flying:
            return
        self.stalled += self.network.wait(job.start)
        self.result.append(job.wait)
        self.result.extend(job.after)
        if job.gathers:
            del self.ahead[job]
        else:
            self.flying.remove(job)

    def has_room(self, job: Job) -> bool:
        """Whether a collective can start within the room and the cap.

        For the cap, one alone always can.
        """
        beside = self.ahead if job.gathers else self.flying
        if self.room is not None and job.gathers:
            least = self.room.least(self.at, self.used(job))
            if job.extra_bytes + self.held_bytes() > least:
                self.held_back[job] = Reason.MEMORY
                return False
        if beside and _bytes(beside) + job.bytes > self.cap_bytes:
            self.held_back[job] = Reason.IN_FLIGHT
            return False
        return True

    def used(self, job: Job) -> int:
        """The place of the compute node that first uses what is gathered."""
        return self.place.get(job.first_use, len(self.compute))

    def start_best(self) -> bool:
        """Start what is best now: an urgent gather, a gradient, a gather further ahead."""
        gather = self.gathers[self.next_gather] if self.next_gather < len(self.gathers) else None
        room = gather is not None and self.has_room(gather)
        if gather is not None and room:
            used = self.stall_free.get(gather.first_use, self.finish_seconds) + self.stalled
            free = self.network.free_seconds(_QUEUE)
            if used - free <= _URGENT * cost_of(gather.start).seconds:
                self.begin(gather)
                return True
        if self.pending and self.has_room(self.pending[0]):
            self.begin(self.pending[0])
            return True
        if gather is not None and room and self.cap_bytes > 0:
            self.begin(gather)
            return True
        if gather is not None and room:
            self.held_back[gather] = Reason.IN_FLIGHT
        return False

    def start_next(self) -> bool:
        """Start what is next in the given sequence, if it can start now."""
        job = self.head
        if job is None or (not job.gathers and job not in self.pending):
            return False
        if self.cap_bytes == 0:
            self.held_back[job] = Reason.IN_FLIGHT
            return False
        if not self.has_room(job):
            return False
        self.head = next(self.in_line, None)
        self.begin(job)
        return True

    def start_now(self, job: Job) -> None:
        """Start a collective that must start now, and all that are before it in line."""
        while job not in self.started:
            if self.sequence is None:
                first = self.gathers[self.next_gather] if job.gathers else self.pending[0]
            else:
                assert self.head is not None
                first, self.head = self.head, next(self.in_line, None)
            if not first.gathers and first not in self.pending:
                raise InvalidGraph(
                    f"pass 'reorder': {first.purpose.label!r} cannot start before "
                    f"{job.purpose.label!r}, as the plan's order says: the plan was made "
                    "for another model; make it again"
                )
            self.begin(first)


_PLENTY = 1 << 62
#: What frames a graph and is never moved.
_FRAME = ("placeholder", "output")


def moved(jobs: Iterable[Job]) -> set[fx.Node]:
    """The nodes that move with collectives."""
    return {n for job in jobs for n in (*job.before, job.start, job.wait, *job.after)}


def is_compute(node: fx.Node, mine: set[fx.Node]) -> bool:
    """Whether a node stays in its place: neither moved nor part of the graph's frame."""
    return node not in mine and node.op not in _FRAME


def _bytes(jobs: Iterable[Job]) -> int:
    return sum(job.bytes for job in jobs)


def _ready_after(job: Job, mine: set[fx.Node], order: dict[fx.Node, int]) -> fx.Node | None:
    """The last compute node a reduction depends on; None if it depends on placeholders only."""
    inputs = [n for n in job.start.all_input_nodes if n.op == "call_function" and n not in mine]
    return max(inputs, key=order.__getitem__, default=None)
