"""Schedule: in what order the nodes of a graph run, collectives beside compute.

See ``passes/overlap/reorder_collectives.py``, which decides under what cap.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import fx

from passes.annotate.annotate_costs import Cost, cost_of
from passes.graph.fx_utils import group_of
from passes.graph.metadata import COLLECTIVE
from passes.graph.verifier import InvalidGraph
from passes.simulate.exposure import Reason
from passes.simulate.network import Network
from passes.types.plan import Collective

#: A gather is urgent once the time left before its use is below this many times its own.
_URGENT = 1.5


@dataclasses.dataclass(eq=False)
class CollectiveTask:
    """One collective: what must run before it starts, itself, and what follows its wait.

    ``follows``, ``then``: the legs before and after it, where it is one of several that carry
    out one collective (``passes/overlap/hierarchical_collectives.py``): it cannot start before the
    former was waited for.
    ``bytes``: of the whole tensor, for the plan's in-flight limit; the same for all legs.
    ``extra_bytes``: what is alive longer if a gather starts early, or a reduction is waited for
    late, than if each happened on the spot. ``flying_bytes``: what a reduction that has started
    keeps alive besides: that into which it receives, and its backend's copy.
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
    follows: CollectiveTask | None = None
    then: CollectiveTask | None = None

    @functools.cached_property
    def group(self) -> str:
        """The process group it runs on, and so its queue."""
        return group_of(self.start)

    @functools.cached_property
    def cost(self) -> Cost:
        """What the collective itself takes."""
        return cost_of(self.start)

    @functools.cached_property
    def seconds_left(self) -> float:
        """Of a collective's legs, from this one to the last."""
        return self.cost.seconds + (0.0 if self.then is None else self.then.seconds_left)

    @property
    def purpose(self) -> Collective:
        """What the collective is for."""
        purpose: Collective = self.start.meta[COLLECTIVE]
        return purpose


class Headroom:
    """Bytes that may be alive besides, at each compute node. Below zero there is none."""

    def __init__(self, free_bytes: Sequence[int]) -> None:
        self._free = np.array(free_bytes, dtype=np.int64)
        #: Whether there was room for anything, if for nothing, at any node.
        self.any_at_first = max(free_bytes, default=-1) >= 0

    def at(self, place: int) -> int:
        """What is left at one node."""
        return int(self._free[place])

    def least(self, start: int, end: int) -> int:
        """What is left at all nodes from one to before another; plenty if there is none."""
        return int(self._free[start:end].min()) if start < end else _PLENTY

    def take(self, size_bytes: int, start: int, end: int) -> None:
        """Take from all nodes from one to before another."""
        self._free[start:end] -= size_bytes


class ScheduleProblem:
    """What does not depend on room or cap of a graph whose collectives are to be scheduled.

    ``compute``: the nodes that stay in their order, and what each takes (``seconds``).
    ``stall_free``: when each would start if nothing ever stalled.
    ``used``, ``ready``: for each of them the collectives that it is the first to use, and the
    reductions whose gradients are there after it. ``ready_at_once``: those that need none.
    """

    def __init__(
        self,
        original: Sequence[fx.Node],
        tasks: Sequence[CollectiveTask],
        seconds: Callable[[fx.Node], float],
    ) -> None:
        """
        Args:
            original: all nodes, in the order they have.
            seconds: what a compute node takes.
        """
        mine = moved(tasks)
        self.inputs = [node for node in original if node.op == "placeholder"]
        self.compute = [node for node in original if is_compute(node, mine)]
        self.seconds = [seconds(node) for node in self.compute]
        self.place = {node: index for index, node in enumerate(self.compute)}
        order = {node: index for index, node in enumerate(original)}
        self.gathers = sorted(
            (task for task in tasks if task.gathers and task.follows is None),
            key=lambda task: (order[task.first_use], order[task.start]),
        )
        self.used: list[list[CollectiveTask]] = [[] for _ in self.compute]
        reductions = [task for task in tasks if not task.gathers and task.follows is None]
        for task in [*self.gathers, *reductions]:
            if task.first_use in self.place:
                self.used[self.place[task.first_use]].append(task)
        self.ready: list[list[CollectiveTask]] = [[] for _ in self.compute]
        self.ready_at_once: list[CollectiveTask] = []
        for task in reductions:
            after = _ready_after(task, mine, order)
            (self.ready_at_once if after is None else self.ready[self.place[after]]).append(task)
        self.stall_free: dict[fx.Node, float] = {}
        self.finish_seconds = 0.0
        for node, took in zip(self.compute, self.seconds, strict=True):
            self.stall_free[node] = self.finish_seconds
            self.finish_seconds += took
        self.total_bytes = sum(task.bytes for task in tasks if task.follows is None)
        self.has_legs = any(task.then is not None for task in tasks)


class Scheduler:
    """Walks the compute nodes with two clocks, of the compute and of the network.

    A leg that has ended is waited for before the next compute node, and the leg after it started
    at once, on its own group's queue, beside whatever is on the others'.
    """

    def __init__(
        self,
        problem: ScheduleProblem,
        cap_bytes: int,
        sequence: list[CollectiveTask] | None = None,
        headroom: Headroom | None = None,
    ) -> None:
        """
        Args:
            cap_bytes: the most that may be gathered ahead of its use, and the most of gradients
                that may wait for their reduction.
            sequence: the order in which the collectives must start (None: the best found).
            room: what may be alive besides, at each compute node (None: whatever it takes).
        """
        self.problem, self.gathers, self.compute = problem, problem.gathers, problem.compute
        self.cap_bytes, self.sequence = cap_bytes, sequence
        self.headroom = headroom
        self.at = 0  # the place of the compute node that runs next
        self.horizon_seconds = 0.0  # how far ahead queues must have something to do
        self.result = list(problem.inputs)
        self.placed: set[fx.Node] = set()
        self.network = Network()
        self.started: set[CollectiveTask] = set()
        self.stalled = 0.0  # in all, so far
        # Kept waiting while the network was idle, by the cap or for want of room (the last of
        # the two); and waited for early, for want of room.
        self.held_back: dict[CollectiveTask, Reason] = {}
        self.drained: dict[CollectiveTask, None] = {}
        self.ahead: dict[CollectiveTask, None] = {}  # gathers started and not waited for
        self.flying: list[CollectiveTask] = []  # reductions started and not waited for
        self.pending = list(problem.ready_at_once)  # reductions that may start
        self.later: list[CollectiveTask] = []  # legs that may start: the former one was waited for
        #: What the gradients on their way, or in line, keep alive for longer than on the spot.
        self.held_bytes = sum(task.extra_bytes for task in self.pending)
        self.next_gather = 0
        self.in_line = iter(sequence or ())
        self.head = next(self.in_line, None)

    def run(self) -> list[fx.Node]:
        """The new order of all nodes but the output.

        Raises:
            InvalidGraph: if the graph cannot follow the given sequence.
        """
        problem, has_legs = self.problem, self.problem.has_legs
        for place, node in enumerate(problem.compute):
            self.at = place
            for task in problem.used[place]:
                self.finish(task)
            if has_legs:
                self.advance()
            seconds = problem.seconds[place]
            self.keep_busy(seconds)
            self.result.append(node)
            self.network.compute(seconds)
            self.after(place)
        for task in self.sequence or [*self.gathers, *self.pending]:
            self.start_now(task)
        for task in self.gathers:
            self.finish(task)
        while self.flying or self.later:
            for task in [*self.later]:
                self.start_now(task)
            self.wait_for(self.flying[0])
        return self.result

    def keep_busy(self, seconds: float) -> None:
        """Start collectives where a queue would run dry while so much time passes."""
        self.horizon_seconds = seconds
        while self.start_best() if self.sequence is None else self.start_next():
            pass

    def after(self, place: int) -> None:
        """What a node's end brings: gradients to reduce, and reductions that have ended."""
        for task in self.problem.ready[place]:
            self.pending.append(task)
            self.held_bytes += task.extra_bytes
            if self.cap_bytes == 0 and self.sequence is None:
                self.finish(task)
        while self.cap_bytes == 0 and self.head in (*self.pending, *self.later):
            assert self.head is not None
            task, self.head = self.head, next(self.in_line, None)
            self.begin(task)
            self.wait_for(task)
        if self.flying:
            for task in [task for task in self.flying if task.start in self.network.ends]:
                self.wait_for(task)
        self.advance()
        # Gradients that wait in line take memory too: above the cap, stall for the oldest.
        capped = self.cap_bytes < self.problem.total_bytes
        while capped and self.flying and _bytes(self.reductions()) > self.cap_bytes:
            self.wait_for(self.flying[0])
            self.advance()
        while self.headroom is not None and self.is_short(self.headroom, self.at + 1):
            oldest = next((one for one in self.flying if one.extra_bytes), None)
            if oldest is not None:
                self.drained[oldest] = None
                self.wait_for(oldest)
                self.advance()
            elif not self.start_pending():
                break

    def is_short(self, headroom: Headroom, place: int) -> bool:
        """Whether the gradients on their way take more than there is room for at a node."""
        if place >= len(self.compute) or not self.held_bytes:
            return False
        return self.held_bytes > max(0, headroom.at(place))

    def reductions(self) -> list[CollectiveTask]:
        """Gradients on their way, or in line: of each the leg that it is at."""
        return [*self.flying, *self.pending, *(task for task in self.later if not task.gathers)]

    def start_pending(self) -> bool:
        """Start the gradient that is first in line, if one may start."""
        first = next(iter(self.pending), None) if self.sequence is None else self.head
        if first is None or first not in self.pending:
            return False
        self.start_now(first)
        return True

    def begin(self, task: CollectiveTask) -> None:
        """Start a collective."""
        self.result.extend(node for node in task.before if node not in self.placed)
        self.placed.update(task.before)
        self.result.append(task.start)
        self.started.add(task)
        cost = task.cost
        self.network.start(task.start, task.group, cost.seconds, cost.wake_seconds)
        self.network.compute(cost.busy_seconds)
        if task.follows is not None:
            self.later.remove(task)
            self.held_bytes -= 0 if task.gathers else task.extra_bytes
        elif task.gathers:
            self.next_gather += 1
        else:
            self.pending.remove(task)
            self.held_bytes -= task.extra_bytes
        if task.gathers:
            self.ahead[task] = None
            if self.headroom is not None:
                self.headroom.take(task.extra_bytes, self.at, self.used(task))
        else:
            self.flying.append(task)
            self.held_bytes += task.flying_bytes + task.extra_bytes

    def wait_for(self, task: CollectiveTask) -> None:
        """Wait for a collective, unless that was done already. The leg after it may then start."""
        if task not in self.ahead and task not in self.flying:
            return
        self.stalled += self.network.wait(task.start)
        self.result.append(task.wait)
        self.result.extend(task.after)
        if task.gathers:
            del self.ahead[task]
        else:
            self.flying.remove(task)
            self.held_bytes -= task.flying_bytes + task.extra_bytes
        if task.then is not None:
            self.later.append(task.then)
            self.held_bytes += 0 if task.then.gathers else task.then.extra_bytes

    def advance(self) -> None:
        """Wait for legs that have ended, which costs nothing, and start those after them."""
        if not self.problem.has_legs:
            return
        for task in [*self.ahead, *self.flying]:
            if task.then is not None and task.start in self.network.ends:
                self.wait_for(task)
        if self.sequence is None:
            for task in [*self.later]:
                if self.has_room(task):
                    self.begin(task)
        else:
            while self.head in self.later and self.start_next():
                pass

    def finish(self, task: CollectiveTask) -> None:
        """Start a collective and wait for it now, leg by leg; meanwhile queues stay filled."""
        leg: CollectiveTask | None = task
        while leg is not None:
            self.start_now(leg)
            self.advance()
            left = self.network.free_seconds(leg.group) - self.network.now
            self.keep_busy(left + (0.0 if leg.then is None else leg.then.seconds_left))
            self.wait_for(leg)
            leg = leg.then

    def has_room(self, task: CollectiveTask) -> bool:
        """Whether a collective can start within the room and the cap.

        For the cap, one alone always can, and a later leg: its first one was counted whole.
        """
        beside: list[CollectiveTask] = []
        if task.follows is None and self.cap_bytes < self.problem.total_bytes:
            beside = [*(self.ahead if task.gathers else self.flying)]
            beside += [leg for leg in self.later if leg.gathers == task.gathers]
        if self.headroom is not None:
            least, more = self.headroom.at(self.at), task.flying_bytes
            if task.gathers:
                least, more = self.headroom.least(self.at, self.used(task)), task.extra_bytes
            if more + self.held_bytes > least:
                self.held_back[task] = Reason.MEMORY
                return False
        if beside and _bytes(beside) + task.bytes > self.cap_bytes:
            self.held_back[task] = Reason.IN_FLIGHT
            return False
        return True

    def used(self, task: CollectiveTask) -> int:
        """The place of the compute node that first uses what is gathered."""
        return self.problem.place.get(task.first_use, len(self.compute))

    def is_due(self, task: CollectiveTask) -> bool:
        """Whether a collective may start by now, as far as its queue goes.

        It may when the queue would run dry before the time is over and so much longer as the
        collective takes: kernels take other times than the clock says, and a queue that has
        something left when they do stays filled. A gradient that no gather is to overtake need
        not wait at all.
        """
        if not task.gathers and self.next_gather == len(self.gathers):
            return True
        due = self.network.now + self.horizon_seconds + task.cost.seconds
        return self.network.free_seconds(task.group) <= due

    def start_best(self) -> bool:
        """Start what is best now: an urgent gather, a gradient, a gather further ahead."""
        gather = self.gathers[self.next_gather] if self.next_gather < len(self.gathers) else None
        if gather is not None and not self.is_due(gather):
            gather = None
        headroom = gather is not None and self.has_room(gather)
        if gather is not None and headroom:
            used = self.problem.stall_free.get(gather.first_use, self.problem.finish_seconds)
            used += self.stalled
            free = self.network.free_seconds(gather.group)
            if used - free <= _URGENT * gather.seconds_left:
                self.begin(gather)
                return True
        first = self.pending[0] if self.pending else None
        if first is not None and self.is_due(first) and self.has_room(first):
            self.begin(first)
            return True
        if gather is not None and headroom and self.cap_bytes > 0:
            self.begin(gather)
            return True
        if gather is not None and headroom:
            self.held_back[gather] = Reason.IN_FLIGHT
        return False

    def start_next(self) -> bool:
        """Start what is next in the given sequence, if it can start now."""
        task = self.head
        if task is None or not self.may_start(task):
            return False
        if task.follows is None and not self.is_due(task):
            return False
        if self.cap_bytes == 0:
            self.held_back[task] = Reason.IN_FLIGHT
            return False
        if not self.has_room(task):
            return False
        self.head = next(self.in_line, None)
        self.begin(task)
        return True

    def may_start(self, task: CollectiveTask) -> bool:
        """Whether what a collective sends is there."""
        if task.follows is not None:
            return task in self.later
        return task.gathers or task in self.pending

    def start_now(self, task: CollectiveTask) -> None:
        """Start a collective that must start now, and all that are before it in line."""
        while task not in self.started:
            if self.sequence is not None:
                assert self.head is not None
                first, self.head = self.head, next(self.in_line, None)
            elif task.follows is not None:
                first = task
            else:
                first = self.gathers[self.next_gather] if task.gathers else self.pending[0]
            if first.follows is not None:
                self.wait_for(first.follows)
            if not self.may_start(first):
                raise InvalidGraph(
                    f"pass 'reorder': {first.purpose.label!r} cannot start before "
                    f"{task.purpose.label!r}, as the plan's order says: the plan was made "
                    "for another model; make it again"
                )
            self.begin(first)


_PLENTY = 1 << 62
#: What frames a graph and is never moved.
_FRAME = ("placeholder", "output")


def moved(tasks: Iterable[CollectiveTask]) -> set[fx.Node]:
    """The nodes that move with collectives."""
    return {n for task in tasks for n in (*task.before, task.start, task.wait, *task.after)}


def is_compute(node: fx.Node, mine: set[fx.Node]) -> bool:
    """Whether a node stays in its place: neither moved nor part of the graph's frame."""
    return node not in mine and node.op not in _FRAME


def _bytes(tasks: Iterable[CollectiveTask]) -> int:
    return sum(task.bytes for task in tasks)


def _ready_after(
    task: CollectiveTask, mine: set[fx.Node], order: dict[fx.Node, int]
) -> fx.Node | None:
    """The last compute node a reduction depends on; None if it depends on placeholders only."""
    inputs = [n for n in task.start.all_input_nodes if n.op == "call_function" and n not in mine]
    return max(inputs, key=order.__getitem__, default=None)
