"""The list scheduler: orders the nodes of a graph so that collectives run beside compute.

``passes/overlap/reorder_collectives.py`` calls it and chooses the in-flight cap and the headroom.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import group_of, is_model_collective
from passes.graph.metadata import COLLECTIVE
from passes.graph.verifier import InvalidGraph
from passes.simulate.network import Network
from passes.types.annotations import Cost, Reason
from passes.types.plan import Collective

#: A gather is urgent once the time from the end of its queue to its first use is at most this
#: many times its own duration.
_URGENT = 1.5


@dataclasses.dataclass(eq=False)
class CollectiveTask:
    """One collective with the nodes that move with it.

    ``before``: the nodes that must run before its start. ``after``: the nodes that follow its wait.
    ``bytes``: bytes of the whole tensor, for the plan's in-flight limit; equal for all stages of a
    hierarchical collective (``passes/overlap/hierarchical_collectives.py``).
    ``extra_bytes``: bytes that live longer if a gather starts early, or a reduction is waited for
    late, compared with a wait directly after the start.
    ``flying_bytes``: further bytes of a reduction in flight: its receive buffer and the backend's
    copy. 0 for a gather.
    ``first_use``: the first node that reads the result.
    ``urgent``: the next kernels need it: it starts before reductions that were ready earlier.
    ``follows``, ``then``: the stages before and after this one, or None. A stage can start only
    after the wait of the stage before it.
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
    urgent: bool = False
    follows: CollectiveTask | None = None
    then: CollectiveTask | None = None

    @functools.cached_property
    def group(self) -> str:
        """The process group, and so the queue, of the collective."""
        return group_of(self.start)

    @functools.cached_property
    def cost(self) -> Cost:
        """The cost of the collective itself."""
        return cost_of(self.start)

    @functools.cached_property
    def seconds_left(self) -> float:
        """Seconds of this stage and all later ones."""
        return self.cost.seconds + (0.0 if self.then is None else self.then.seconds_left)

    @property
    def purpose(self) -> Collective:
        """The purpose of the collective."""
        return COLLECTIVE.of(self.start)


class Headroom:
    """Free bytes under the memory limit at each compute node. Below zero there are none."""

    def __init__(self, free_bytes: Sequence[int]) -> None:
        self._free = np.array(free_bytes, dtype=np.int64)
        #: Whether any node has a headroom of zero or more before anything is taken.
        self.any_at_first = max(free_bytes, default=-1) >= 0

    def at(self, place: int) -> int:
        """Free bytes at one node."""
        return int(self._free[place])

    def least(self, start: int, end: int) -> int:
        """The least free bytes in ``[start, end)``; a huge number if the range is empty."""
        return int(self._free[start:end].min()) if start < end else _PLENTY

    def take(self, size_bytes: int, start: int, end: int) -> None:
        """Take bytes from every node in ``[start, end)``."""
        self._free[start:end] -= size_bytes


class ScheduleProblem:
    """The facts of a scheduling problem that do not depend on headroom or cap.

    ``compute``: the compute nodes, which keep their order. ``seconds``: the time of each.
    ``stall_free``: by compute node, its start in seconds without any stall but those of urgent
    collectives.
    ``used``: by compute node, the collectives whose results it is the first to use.
    ``ready``: by compute node, the reductions whose inputs are ready after it.
    ``ready_at_once``: the reductions that depend on no compute node.
    ``urgent``: the number of urgent collectives.
    ``of_model``: the compute nodes that are collectives of the model itself.
    ``until_model``: by process group, the seconds from the start of each compute node to the next
    collective of the model that uses the links of the group.
    """

    def __init__(
        self,
        original: Sequence[fx.Node],
        tasks: Sequence[CollectiveTask],
        seconds: Callable[[fx.Node], float],
    ) -> None:
        """
        Args:
            original: all nodes in their current order.
            seconds: the time of a compute node.
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
        for node, took, tasks_used in zip(self.compute, self.seconds, self.used, strict=True):
            self.finish_seconds += sum(one.cost.seconds for one in tasks_used if one.urgent)
            self.stall_free[node] = self.finish_seconds
            self.finish_seconds += took
        self.total_bytes = sum(task.bytes for task in tasks if task.follows is None)
        self.has_stages = any(task.then is not None for task in tasks)
        self.urgent = sum(task.urgent for task in tasks)
        self.of_model = {node for node in self.compute if is_model_collective(node)}
        self.until_model = self._until_model() if self.of_model else {}

    def _until_model(self) -> dict[str, list[float]]:
        groups = sorted({group for node in self.of_model for group in cost_of(node).beside})
        found = {group: [math.inf] * len(self.compute) for group in groups}
        for group, until in found.items():
            left = math.inf
            for place in range(len(self.compute) - 1, -1, -1):
                node = self.compute[place]
                uses = node in self.of_model and group in cost_of(node).beside
                left = 0.0 if uses else left + self.seconds[place]
                until[place] = left
        return found


class Scheduler:
    """One walk over the compute nodes, with a clock for compute and one for the network.

    A stage of a hierarchical collective that has ended is waited for before the next compute node.
    The next stage starts at once on the queue of its own group.

    A collective of the model itself stands where the model has it, and compute waits for it. On
    other links, collectives of ours run at the same time. On the same links they would only delay
    it: none starts directly before it, and only an urgent gather starts that will run into it.
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
            cap_bytes: the most bytes of gathers in flight, and the most bytes of gradients whose
                reductions are pending or in flight.
            sequence: the required start order of the collectives (None: search for a good one).
            headroom: free bytes at each compute node (None: no limit).
        """
        self.problem, self.gathers, self.compute = problem, problem.gathers, problem.compute
        self.cap_bytes, self.sequence = cap_bytes, sequence
        self.headroom = headroom
        self.at = 0  # the place of the next compute node
        self.horizon_seconds = 0.0  # the time for which queues must have work
        self.next_start = 0.0  # when the next compute node starts, in seconds
        self.occupied: frozenset[str] = frozenset()  # the groups that start nothing now
        self.result = list(problem.inputs)
        self.placed: set[fx.Node] = set()
        self.network = Network()
        self.started: set[CollectiveTask] = set()
        self.stalled = 0.0  # sum of all stalls so far above those of ``stall_free``, in seconds
        self.urgent = problem.urgent  # the number of urgent collectives that have not started
        # Collectives held back by the cap or by too little headroom (the latest reason counts),
        # and reductions waited for early because of too little headroom.
        self.held_back: dict[CollectiveTask, Reason] = {}
        self.drained: dict[CollectiveTask, None] = {}
        self.ahead: dict[CollectiveTask, None] = {}  # gathers in flight
        self.flying: list[CollectiveTask] = []  # reductions in flight
        self.pending = list(problem.ready_at_once)  # reductions that may start
        self.later: list[CollectiveTask] = []  # later stages that may start
        #: Extra bytes that pending reductions and reductions in flight keep alive.
        self.held_bytes = sum(task.extra_bytes for task in self.pending)
        self.next_gather = 0
        self.in_line = iter(sequence or ())
        self.head = next(self.in_line, None)

    def run(self) -> list[fx.Node]:
        """The new order of all nodes except the output.

        Raises:
            InvalidGraph: the graph cannot follow the given sequence.
        """
        problem, has_stages = self.problem, self.problem.has_stages
        for place, node in enumerate(problem.compute):
            self.at = place
            for task in problem.used[place]:
                self.finish(task)
            if has_stages:
                self.advance()
            self.compute_node(node, problem.seconds[place])
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

    def compute_node(self, node: fx.Node, seconds: float) -> None:
        """Run a compute node, or a collective of the model itself."""
        if node not in self.problem.of_model:
            self.keep_busy(seconds)
            self.result.append(node)
            self.network.compute(seconds)
            return
        cost = cost_of(node)
        self.occupied = cost.beside
        self.keep_busy(seconds)
        self.occupied = frozenset()
        self.result.append(node)
        self.network.start(
            node,
            group_of(node),
            seconds,
            lateness=cost.lateness,
            beside=cost.beside,
        )
        self.stalled += self.network.wait(node) - seconds

    def keep_busy(self, seconds: float, stall: float = 0.0) -> None:
        """Start collectives whose queues would run dry within the next ``seconds``.

        ``stall``: the seconds until the next compute node starts.
        """
        self.horizon_seconds = seconds
        self.next_start = self.network.now + stall
        while self.start_best() if self.sequence is None else self.start_next():
            pass

    def after(self, place: int) -> None:
        """Handle the end of a compute node: newly ready gradients, and ended reductions."""
        for task in self.problem.ready[place]:
            self.is_ready(task)
        while self.cap_bytes == 0 and self.head in (*self.pending, *self.later):
            assert self.head is not None
            task, self.head = self.head, next(self.in_line, None)
            self.begin(task)
            self.wait_for(task)
        if self.flying:
            for task in [task for task in self.flying if task.start in self.network.ends]:
                self.wait_for(task)
        self.advance()
        # Pending gradients take memory too: above the cap, stall for the oldest reduction.
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

    def is_ready(self, task: CollectiveTask) -> None:
        """The input of a reduction is ready: it is pending; an urgent one starts at once."""
        self.pending.append(task)
        self.held_bytes += task.extra_bytes
        if self.sequence is not None:
            return
        if self.cap_bytes == 0:
            self.finish(task)
        elif task.urgent:
            self.begin(task)

    def is_short(self, headroom: Headroom, place: int) -> bool:
        """Whether pending reductions and those in flight exceed the headroom at a node."""
        if place >= len(self.compute) or not self.held_bytes:
            return False
        return self.held_bytes > max(0, headroom.at(place))

    def reductions(self) -> list[CollectiveTask]:
        """Reductions in flight or pending; of a hierarchical one its current stage."""
        return [*self.flying, *self.pending, *(task for task in self.later if not task.gathers)]

    def start_pending(self) -> bool:
        """Start the first pending reduction, if one may start. Returns whether it did."""
        first = next(iter(self.pending), None) if self.sequence is None else self.head
        if first is None or first not in self.pending:
            return False
        self.start_now(first)
        return True

    def begin(self, task: CollectiveTask) -> None:
        """Start a collective now."""
        self.result.extend(node for node in task.before if node not in self.placed)
        self.placed.update(task.before)
        self.result.append(task.start)
        self.started.add(task)
        self.urgent -= task.urgent
        cost = task.cost
        self.network.start(
            task.start, task.group, cost.seconds, cost.start_delay_seconds, cost.lateness
        )
        self.network.compute(cost.compute_overhead_seconds)
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
        """Wait for a collective that is in flight. The next stage may then start."""
        if task not in self.ahead and task not in self.flying:
            return
        self.stalled += self.network.wait(task.start) - (task.cost.seconds if task.urgent else 0.0)
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
        """Wait for ended stages, which takes no time, and start the stages after them."""
        if not self.problem.has_stages:
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
        """Start a collective and wait for it now, stage by stage. Queues stay filled meanwhile."""
        stage: CollectiveTask | None = task
        while stage is not None:
            self.start_now(stage)
            self.advance()
            if not stage.urgent:
                left = self.network.free_seconds(stage.group) - self.network.now
                later = 0.0 if stage.then is None else stage.then.seconds_left
                self.keep_busy(left + later, left + later)
            self.wait_for(stage)
            stage = stage.then

    def has_room(self, task: CollectiveTask) -> bool:
        """Whether a collective can start within the headroom and the cap.

        The cap never holds back a single collective, or a later stage: the bytes of the first
        stage are those of the whole collective.
        """
        beside: list[CollectiveTask] = []
        if task.follows is None and self.cap_bytes < self.problem.total_bytes:
            beside = [*(self.ahead if task.gathers else self.flying)]
            beside += [stage for stage in self.later if stage.gathers == task.gathers]
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
        """The place of the first compute node that uses the gathered tensor."""
        return self.problem.place.get(task.first_use, len(self.compute))

    def is_due(self, task: CollectiveTask) -> bool:
        """Whether the queue of a collective needs it now.

        It does if the queue runs dry before the end of the horizon plus the collective's own
        duration. The margin keeps the queue filled although real kernel times differ from the
        clock. A reduction is always due when no gather is left that could overtake it.

        Compute waits for every urgent collective. As long as one has to come, others fill the time
        between them only: no margin.
        """
        if task.group in self.occupied:
            return False
        due = self.network.now + self.horizon_seconds
        if not self.urgent:
            if not task.gathers and self.next_gather == len(self.gathers):
                return True
            due += task.cost.seconds
        return self.network.free_seconds(task.group) <= due

    def is_urgent(self, gather: CollectiveTask) -> bool:
        """Whether a gather has to start now: its first use is near."""
        used = self.problem.stall_free.get(gather.first_use, self.problem.finish_seconds)
        used += self.stalled
        free = self.network.free_seconds(gather.group)
        return used - free <= _URGENT * gather.seconds_left

    def runs_into_model(self, task: CollectiveTask) -> bool:
        """Whether a gather would delay the next collective of the model on its links."""
        until = self.problem.until_model.get(task.group)
        if until is None or not task.gathers or self.at >= len(until):
            return False
        ends = self.network.free_seconds(task.group) + task.cost.seconds
        return ends > self.next_start + until[self.at]

    def start_best(self) -> bool:
        """Start an urgent gather, else a reduction, else a later gather. False: nothing starts."""
        gather = self.gathers[self.next_gather] if self.next_gather < len(self.gathers) else None
        if gather is not None and not self.is_due(gather):
            gather = None
        headroom = gather is not None and self.has_room(gather)
        if gather is not None and headroom and self.is_urgent(gather):
            self.begin(gather)
            return True
        first = self.pending[0] if self.pending else None
        if first is not None and self.is_due(first) and self.has_room(first):
            self.begin(first)
            return True
        if gather is not None and headroom and self.runs_into_model(gather):
            self.held_back[gather] = Reason.LINKS
            return False
        if gather is not None and headroom and self.cap_bytes > 0 and not self.urgent:
            self.begin(gather)
            return True
        if gather is not None and headroom:
            self.held_back[gather] = Reason.IN_FLIGHT
        return False

    def start_next(self) -> bool:
        """Start the next collective of the given sequence. False: it cannot start now."""
        task = self.head
        if task is None or not self.may_start(task):
            return False
        if task.follows is None and not self.is_due(task):
            return False
        if self.cap_bytes == 0:
            self.held_back[task] = Reason.IN_FLIGHT
            return False
        if self.runs_into_model(task) and not self.is_urgent(task):
            self.held_back[task] = Reason.LINKS
            return False
        if not self.has_room(task):
            return False
        self.head = next(self.in_line, None)
        self.begin(task)
        return True

    def may_start(self, task: CollectiveTask) -> bool:
        """Whether the input of a collective is ready."""
        if task.follows is not None:
            return task in self.later
        return task.gathers or task in self.pending

    def start_now(self, task: CollectiveTask) -> None:
        """Start a collective that must start now, after all collectives before it in order.

        Raises:
            InvalidGraph: the input of one of them is not ready.
        """
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
                    "for another model; make a new one"
                )
            self.begin(first)


_PLENTY = 1 << 62
#: Operators at the ends of a graph, which never move.
_FRAME = ("placeholder", "output")


def moved(tasks: Iterable[CollectiveTask]) -> set[fx.Node]:
    """The nodes that move with collectives."""
    return {n for task in tasks for n in (*task.before, task.start, task.wait, *task.after)}


def is_compute(node: fx.Node, mine: set[fx.Node]) -> bool:
    """Whether a node is compute: it keeps its order, and is no placeholder and no output."""
    return node not in mine and node.op not in _FRAME


def _bytes(tasks: Iterable[CollectiveTask]) -> int:
    return sum(task.bytes for task in tasks)


def _ready_after(
    task: CollectiveTask, mine: set[fx.Node], order: dict[fx.Node, int]
) -> fx.Node | None:
    """The last compute node that a reduction reads; None if it reads placeholders only."""
    inputs = [n for n in task.start.all_input_nodes if n.op == "call_function" and n not in mine]
    return max(inputs, key=order.__getitem__, default=None)
