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
from passes.graph import group_of
from passes.network import Network

#: A gather is urgent once the time left before its use is below this many times its own.
_URGENT = 1.5


@dataclasses.dataclass(eq=False)
class Job:
    """One collective: what must run before it starts, itself, and what follows its wait.

    ``follows``, ``then``: the legs before and after it, where it is one of several that carry
    out one collective (``passes/levels.py``): it cannot start before the former was waited for.
    ``bytes``: of the whole tensor, for the plan's in-flight limit; the same for all legs.
    ``extra_bytes``: what is alive longer if a gather starts early, or a reduction is waited for
    late, than if each happened on the spot. ``flying_bytes``: what a reduction that has started
    keeps alive besides: that into which it receives.
    """

    before: list[fx.Node]
    start: fx.Node
    wait: fx.Node
    after: list[fx.Node]
    gathers: bool
    bytes: int
    extra_bytes: int
    flying_bytes: int
    first_use: fx.Node
    follows: Job | None = None
    then: Job | None = None

    @property
    def group(self) -> str:
        """The process group it runs on, and so its queue."""
        return group_of(self.start)

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
    """Walks the compute nodes with two clocks, of the compute and of the network.

    A leg that has ended is waited for before the next compute node, and the leg after it started
    at once, on its own group's queue, beside whatever is on the others'.
    """

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
        self.horizon_seconds = 0.0  # how far ahead queues must have something to do
        order = {node: index for index, node in enumerate(original)}
        self.gathers = sorted(
            (job for job in jobs if job.gathers and job.follows is None),
            key=lambda job: (order[job.first_use], order[job.start]),
        )
        self.used_at: dict[fx.Node, list[Job]] = {}
        reductions = [job for job in jobs if not job.gathers and job.follows is None]
        for job in [*self.gathers, *reductions]:
            self.used_at.setdefault(job.first_use, []).append(job)
        self.ready_at: dict[fx.Node | None, list[Job]] = {}
        for job in reductions:
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
        self.later: list[Job] = []  # legs that may start: the former one was waited for
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
                self.finish(job)
            self.advance()
            self.keep_busy(self.seconds(node))
            self.result.append(node)
            self.network.compute(self.seconds(node))
            self.after(node)
        for job in self.sequence or [*self.gathers, *self.pending]:
            self.start_now(job)
        for job in self.gathers:
            self.finish(job)
        while self.flying or self.later:
            for job in [*self.later]:
                self.start_now(job)
            self.wait_for(self.flying[0])
        return self.result

    def keep_busy(self, seconds: float) -> None:
        """Start collectives where a queue would run dry while so much time passes."""
        self.horizon_seconds = seconds
        while self.start_best() if self.sequence is None else self.start_next():
            pass

    def after(self, node: fx.Node) -> None:
        """What a node's end brings: gradients to reduce, and reductions that have ended."""
        for job in self.ready_at.get(node, ()):
            self.pending.append(job)
            if self.cap_bytes == 0 and self.sequence is None:
                self.finish(job)
        while self.cap_bytes == 0 and self.head in (*self.pending, *self.later):
            assert self.head is not None
            job, self.head = self.head, next(self.in_line, None)
            self.begin(job)
            self.wait_for(job)
        for job in [job for job in self.flying if job.start in self.network.ends]:
            self.wait_for(job)
        self.advance()
        # Gradients that wait in line take memory too: above the cap, stall for the oldest.
        while self.flying and _bytes(self.reductions()) > self.cap_bytes:
            self.wait_for(self.flying[0])
            self.advance()
        while self.is_short(self.at + 1):
            oldest = next((one for one in self.flying if one.extra_bytes), None)
            if oldest is not None:
                self.drained[oldest] = None
                self.wait_for(oldest)
                self.advance()
            elif not self.start_pending():
                break

    def is_short(self, place: int) -> bool:
        """Whether the gradients on their way take more than there is room for at a node."""
        if self.room is None or place >= len(self.compute):
            return False
        return self.held_bytes() > max(0, self.room.at(place))

    def held_bytes(self) -> int:
        """What the gradients on their way, or in line, keep alive for longer than on the spot."""
        received_bytes = sum(job.flying_bytes for job in self.flying)
        return received_bytes + sum(job.extra_bytes for job in self.reductions())

    def reductions(self) -> list[Job]:
        """Gradients on their way, or in line: of each the leg that it is at."""
        return [*self.flying, *self.pending, *(job for job in self.later if not job.gathers)]

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
        self.network.start(job.start, job.group, cost.seconds, cost.wake_seconds)
        self.network.compute(cost.busy_seconds)
        if job.follows is not None:
            self.later.remove(job)
        elif job.gathers:
            self.next_gather += 1
        else:
            self.pending.remove(job)
        if job.gathers:
            self.ahead[job] = None
            if self.room is not None:
                self.room.take(job.extra_bytes, self.at, self.used(job))
        else:
            self.flying.append(job)

    def wait_for(self, job: Job) -> None:
        """Wait for a collective, unless that was done already. The leg after it may then start."""
        if job not in self.ahead and job not in self.flying:
            return
        self.stalled += self.network.wait(job.start)
        self.result.append(job.wait)
        self.result.extend(job.after)
        if job.gathers:
            del self.ahead[job]
        else:
            self.flying.remove(job)
        if job.then is not None:
            self.later.append(job.then)

    def advance(self) -> None:
        """Wait for legs that have ended, which costs nothing, and start those after them."""
        for job in [*self.ahead, *self.flying]:
            if job.then is not None and job.start in self.network.ends:
                self.wait_for(job)
        if self.sequence is None:
            for job in [*self.later]:
                if self.has_room(job):
                    self.begin(job)
        else:
            while self.head in self.later and self.start_next():
                pass

    def finish(self, job: Job) -> None:
        """Start a collective and wait for it now, leg by leg; meanwhile queues stay filled."""
        leg: Job | None = job
        while leg is not None:
            self.start_now(leg)
            self.advance()
            left = self.network.free_seconds(leg.group) - self.network.now
            self.keep_busy(left + _seconds_of(leg.then))
            self.wait_for(leg)
            leg = leg.then

    def has_room(self, job: Job) -> bool:
        """Whether a collective can start within the room and the cap.

        For the cap, one alone always can, and a later leg: its first one was counted whole.
        """
        beside: list[Job] = []
        if job.follows is None:
            beside = [*(self.ahead if job.gathers else self.flying)]
            beside += [leg for leg in self.later if leg.gathers == job.gathers]
        if self.room is not None:
            least, more = self.room.at(self.at), job.flying_bytes
            if job.gathers:
                least, more = self.room.least(self.at, self.used(job)), job.extra_bytes
            if more + self.held_bytes() > least:
                self.held_back[job] = Reason.MEMORY
                return False
        if beside and _bytes(beside) + job.bytes > self.cap_bytes:
            self.held_back[job] = Reason.IN_FLIGHT
            return False
        return True

    def used(self, job: Job) -> int:
        """The place of the compute node that first uses what is gathered."""
        return self.place.get(job.first_use, len(self.compute))

    def is_due(self, job: Job) -> bool:
        """Whether a collective may start by now, as far as its queue goes.

        It may when the queue would run dry before the time is over and so much longer as the
        collective takes: kernels take other times than the clock says, and a queue that has
        something left when they do stays filled. A gradient that no gather is to overtake need
        not wait at all.
        """
        if not job.gathers and self.next_gather == len(self.gathers):
            return True
        due = self.network.now + self.horizon_seconds + cost_of(job.start).seconds
        return self.network.free_seconds(job.group) <= due

    def start_best(self) -> bool:
        """Start what is best now: an urgent gather, a gradient, a gather further ahead."""
        gather = self.gathers[self.next_gather] if self.next_gather < len(self.gathers) else None
        if gather is not None and not self.is_due(gather):
            gather = None
        room = gather is not None and self.has_room(gather)
        if gather is not None and room:
            used = self.stall_free.get(gather.first_use, self.finish_seconds) + self.stalled
            free = self.network.free_seconds(gather.group)
            if used - free <= _URGENT * _seconds_of(gather):
                self.begin(gather)
                return True
        first = self.pending[0] if self.pending else None
        if first is not None and self.is_due(first) and self.has_room(first):
            self.begin(first)
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
        if job is None or not self.may_start(job):
            return False
        if job.follows is None and not self.is_due(job):
            return False
        if self.cap_bytes == 0:
            self.held_back[job] = Reason.IN_FLIGHT
            return False
        if not self.has_room(job):
            return False
        self.head = next(self.in_line, None)
        self.begin(job)
        return True

    def may_start(self, job: Job) -> bool:
        """Whether what a collective sends is there."""
        if job.follows is not None:
            return job in self.later
        return job.gathers or job in self.pending

    def start_now(self, job: Job) -> None:
        """Start a collective that must start now, and all that are before it in line."""
        while job not in self.started:
            if self.sequence is not None:
                assert self.head is not None
                first, self.head = self.head, next(self.in_line, None)
            elif job.follows is not None:
                first = job
            else:
                first = self.gathers[self.next_gather] if job.gathers else self.pending[0]
            if first.follows is not None:
                self.wait_for(first.follows)
            if not self.may_start(first):
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


def _seconds_of(job: Job | None) -> float:
    """Of a collective's legs, from this one to the last."""
    return 0.0 if job is None else cost_of(job.start).seconds + _seconds_of(job.then)


def _bytes(jobs: Iterable[Job]) -> int:
    return sum(job.bytes for job in jobs)


def _ready_after(job: Job, mine: set[fx.Node], order: dict[fx.Node, int]) -> fx.Node | None:
    """The last compute node a reduction depends on; None if it depends on placeholders only."""
    inputs = [n for n in job.start.all_input_nodes if n.op == "call_function" and n not in mine]
    return max(inputs, key=order.__getitem__, default=None)
