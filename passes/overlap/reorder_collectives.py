"""Reorder: start collectives early and wait for them late, within the memory limit.

Needs: an annotated graph with each collective's wait directly after its start.
Leaves: the same nodes in another order; ``HELD_BACK`` and ``DRAINED`` of the collectives; the
module's ``MEMORY`` with a memory limit or while planning.

Before::                                  After::

    a = wait(gather(p)); x = mm(x, a)         s = gather(p); t = gather(q)
    b = wait(gather(q)); x = mm(x, b)         a = wait(s); x = mm(x, a)
    r = wait(reduce(g)); ...                  b = wait(t); x = mm(x, b)

The pass walks the compute nodes with one clock for compute and one for the network. When a queue
of the network would run dry soon, the pass starts the next collective: an urgent gather (its data
would arrive late), else a ready gradient, else a later gather, within the headroom. "Soon" is the
time of the next kernel or wait plus the collective's own time, because no clock is exact. Without
gathers left, a reduction starts as soon as its gradient is ready. As long as tokens have to travel
between kernels, other collectives fill the time between them: a gather starts when it is urgent.

A reduction is waited for after its end, or at once if the headroom is too small for its gradient.
The headroom of a node is the memory limit minus the memory there while no collective overlaps
compute. If the simulated peak is still above the limit, the pass tries again with less headroom,
and finally with nothing in flight: it gives up overlap before memory. If no schedule fits, the one
with the least peak counts.

All ranks must start the same collectives in the same order, even with different batch sizes. So
the planner decides the order once (``ctx.deciding``), and all ranks follow it (``plan.order``).
For a graph that the plan has no order for, the clock counts kernels and ignores their costs. All
process groups share one order: with one order per group, ranks could wait for each other in
different groups.

A collective of the model itself (``passes/ops/model_collectives.py``) does not move. Where it uses
the links of ours, none of ours starts directly before it, and only urgent gathers run into it.

Each stage of a hierarchical collective (``passes/overlap/hierarchical_collectives.py``) is a
collective of its own. It can start after the wait of the stage before it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from passes.annotate.annotate_costs import collective_full_bytes, cost_of
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import (
    ALL_REDUCE,
    COLLECTIVES,
    is_alias,
    is_packing,
    output_node,
    positions,
    root_of,
)
from passes.graph.metadata import (
    AFTER_WAIT,
    COLLECTIVE,
    DATAFLOW,
    DRAINED,
    HELD_BACK,
    MEMORY,
    UNSCHEDULED,
)
from passes.graph.op_traits import is_fusible
from passes.overlap.list_scheduler import (
    CollectiveTask,
    Headroom,
    ScheduleProblem,
    Scheduler,
    is_compute,
    moved,
)
from passes.simulate.memory import MemoryModel, MemoryTrace
from passes.types.annotations import Reason
from passes.types.context import Context
from passes.types.plan import Collective

_CLONE = torch.ops.aten.clone.default
#: Number of schedules to try before the one with nothing in flight.
_ROOM_TRIES = 6


def reorder(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Schedule the collectives. See the module's docstring."""
    graph = gm.graph
    tasks = _jobs(graph)
    if not tasks:
        return gm
    memory = MemoryModel(DATAFLOW.get(gm) or Dataflow(graph))
    unscheduled = None
    if ctx.limit_bytes is not None:
        unscheduled = list(zip(graph.nodes, memory.trace().curve, strict=True))
        if ctx.deciding:
            UNSCHEDULED.set(gm, [(node.name, size_bytes) for node, size_bytes in unscheduled])
    bound = ctx.plan.in_flight_bytes
    allowed_bytes = _total_bytes(tasks) if bound is None else bound
    scheduler, trace = _schedule_within_limit(graph, tasks, allowed_bytes, memory, unscheduled, ctx)
    _apply(graph, scheduler.result)
    if ctx.deciding and trace is None:
        trace = memory.trace([*scheduler.result, output_node(graph)])
    if trace is not None:
        MEMORY.set(gm, memory.described(trace))
    if not ctx.deciding:
        graph.lint()
    for task in tasks:
        HELD_BACK.set(task.start, _held_back(task, scheduler, allowed_bytes))
        DRAINED.set(task.start, task in scheduler.drained)
    return gm


def _schedule_within_limit(
    graph: fx.Graph,
    tasks: list[CollectiveTask],
    allowed_bytes: int,
    memory: MemoryModel,
    unscheduled: list[tuple[fx.Node, int]] | None,
    ctx: Context,
) -> tuple[Scheduler, MemoryTrace | None]:
    """The first schedule within the memory limit, or the one with the least peak; its memory.

    ``allowed_bytes``: in-flight limit of the first schedules. ``unscheduled``: the nodes in their
    order and the bytes alive at each, without any overlap. It and the memory are None without a
    limit.
    """
    original, output = list(graph.nodes), output_node(graph)
    sequence = None if ctx.deciding else _sequence(original, tasks, ctx)
    free_bytes = None
    if unscheduled is not None and ctx.limit_bytes is not None:
        free_bytes = _free_bytes(unscheduled, tasks, ctx.limit_bytes - ctx.base_bytes)
    problem = ScheduleProblem(original, tasks, _seconds)
    cap_bytes = allowed_bytes
    spare_bytes = 0  # safety margin of the headroom
    tried: list[tuple[Scheduler, MemoryTrace]] = []
    while True:
        headroom = (
            None if free_bytes is None else Headroom([free - spare_bytes for free in free_bytes])
        )
        scheduler = Scheduler(problem, cap_bytes, sequence, headroom)
        order = scheduler.run()
        if ctx.limit_bytes is None:
            return scheduler, None
        trace = memory.trace([*order, output])
        tried.append((scheduler, trace))
        above_bytes = ctx.base_bytes + trace.peak_bytes - ctx.limit_bytes
        if above_bytes <= 0:
            return scheduler, trace
        if cap_bytes == 0:
            return min(tried, key=lambda one: one[1].peak_bytes)
        spare_bytes += above_bytes
        if len(tried) >= _ROOM_TRIES or (headroom is not None and not headroom.any_at_first):
            cap_bytes = 0  # without any headroom, even less of it gives the same schedule


def _held_back(task: CollectiveTask, scheduler: Scheduler, allowed_bytes: int) -> Reason:
    """The reason why a collective did not start earlier.

    ``allowed_bytes``: the plan's in-flight limit.
    """
    if task not in scheduler.held_back:
        return Reason.MEMORY if task in scheduler.drained else Reason.ORDER
    if scheduler.cap_bytes < allowed_bytes:
        return Reason.MEMORY  # nothing is in flight because the memory limit leaves no headroom
    return scheduler.held_back[task]


def _free_bytes(
    unscheduled: list[tuple[fx.Node, int]], tasks: list[CollectiveTask], limit_bytes: int
) -> list[int]:
    """Free bytes at each compute node without any overlap."""
    mine = moved(tasks)
    free_bytes: list[int] = []
    for node, alive_bytes in unscheduled:
        left = limit_bytes - alive_bytes
        if is_compute(node, mine):
            free_bytes.append(left)
        elif free_bytes:  # a collective after the compute node may need more memory than the node
            free_bytes[-1] = min(free_bytes[-1], left)
    return free_bytes


def order_of(graph: fx.Graph) -> tuple[Collective, ...]:
    """The purposes of a graph's collectives, in their start order."""
    return tuple(COLLECTIVE.of(n) for n in graph.nodes if COLLECTIVE.is_set(n))


def _seconds(node: fx.Node) -> float:
    return cost_of(node).seconds


def _sequence(
    original: list[fx.Node], tasks: list[CollectiveTask], ctx: Context
) -> list[CollectiveTask]:
    """The start order of the collectives. It does not depend on batch sizes."""
    planned = ctx.plan.order_for(ctx.phase.value, [task.purpose for task in tasks])
    if planned is not None:
        by_purpose = {task.purpose: task for task in tasks}
        # On a mesh without dimensions, a hierarchical collective of the plan runs as its first
        # stage only.
        own = [one for one in planned if one.stage == 0 or one in by_purpose]
        return [by_purpose[purpose] for purpose in own]
    # Assume as much compute as communication, spread evenly over the kernels that are not fused.
    kernels = {n for n in original if n.op == "call_function" and not is_fusible(n)}
    each = sum(cost_of(task.start).seconds for task in tasks) / max(1, len(kernels))
    total = _total_bytes(tasks)
    bound = ctx.plan.in_flight_bytes
    problem = ScheduleProblem(original, tasks, lambda node: each if node in kernels else 0.0)
    order = Scheduler(problem, total if bound is None else bound).run()
    by_start = {task.start: task for task in tasks}
    return [by_start[node] for node in order if node in by_start]


def _jobs(graph: fx.Graph) -> list[CollectiveTask]:
    order = positions(graph)
    tasks = []
    for start in graph.nodes:
        if start.target not in COLLECTIVES or not COLLECTIVE.is_set(start):
            continue
        (wait,) = start.users
        purpose = COLLECTIVE.of(start)
        gathers = purpose.gathers and (not purpose.tokens or _is_from_inputs(start))
        prepared = gathers and purpose.stage == 0
        before = _preparation(start, order) if prepared else []
        after = _following(wait, order, only_marked=gathers or purpose.tokens)
        own = {wait, *after}
        readers = [user for node in own for user in node.users if user not in own]
        first_use = min(readers, key=order.__getitem__, default=output_node(graph))
        tasks.append(
            CollectiveTask(
                before,
                start,
                wait,
                after,
                gathers,
                collective_full_bytes(start),
                _extra_bytes(start, before, gathers),
                0 if gathers else cost_of(start).memory_bytes + cost_of(start).workspace_bytes,
                first_use,
                urgent=purpose.tokens and not gathers,
            )
        )
    _join_stages(tasks)
    return tasks


def _join_stages(tasks: list[CollectiveTask]) -> None:
    """Link the stages of hierarchical collectives.

    All stages get the bytes of the largest stage, and the first use of the last stage.
    """
    latest: dict[Collective, CollectiveTask] = {}
    for task in tasks:
        latest[task.purpose] = task
        if task.purpose.stage:
            former = latest[dataclasses.replace(task.purpose, stage=task.purpose.stage - 1)]
            task.follows, former.then = former, task
            task.bytes = max(task.bytes, former.bytes)
    for task in reversed(tasks):  # from the last stage to the first
        if task.then is not None:
            task.bytes, task.first_use = task.then.bytes, task.then.first_use


def _total_bytes(tasks: list[CollectiveTask]) -> int:
    return sum(task.bytes for task in tasks if task.follows is None)


def _extra_bytes(start: fx.Node, before: list[fx.Node], gathers: bool) -> int:
    """Extra bytes alive because of a gather's early start or a reduction's late wait."""
    if gathers:
        copied_bytes = cost_of(start).workspace_bytes
        return copied_bytes + sum(cost_of(node).memory_bytes for node in (start, *before))
    # The input of a reduction lives longer; an all-reduce works in place.
    sent = root_of(start.args[0])  # type: ignore[arg-type]
    return 0 if start.target is ALL_REDUCE else cost_of(sent).memory_bytes


def _is_from_inputs(start: fx.Node) -> bool:
    """Whether a collective sends an input of the graph, in another layout at most.

    Its copy then moves with it.
    """
    source = start
    while source.op == "call_function":
        is_layout = is_alias(source) or is_packing(source) or source.target is _CLONE
        if source is not start and not is_layout:
            return False
        (source, *_) = source.all_input_nodes
    return source.op == "placeholder"


def _preparation(start: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The nodes that a gather needs first: pads and copies of parameters, in graph order."""
    chain: dict[fx.Node, None] = {}
    stack = [start]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source.op == "call_function" and source not in chain:
                chain[source] = None
                stack.append(source)
    return sorted(chain, key=order.__getitem__)


def _following(wait: fx.Node, order: dict[fx.Node, int], only_marked: bool) -> list[fx.Node]:
    """The nodes that move with a wait: they depend on its tensor only.

    After a gather these are only nodes that the passes marked (``after_wait``); other nodes belong
    to the model. After a reduction they include nodes that a user's pass adds for one gradient.
    The next stage moves by itself.
    """
    own: dict[fx.Node, None] = {wait: None}
    sent = set(wait.all_input_nodes[0].all_input_nodes)
    changed = True
    frontier = [wait]
    while changed:
        changed = False
        for node in list(frontier):
            for user in node.users:
                if user in own or user.op != "call_function" or COLLECTIVE.is_set(user):
                    continue
                moves = not only_marked or AFTER_WAIT.is_set(user)
                if moves and all(
                    source in own or source in sent or source.op == "placeholder"
                    for source in user.all_input_nodes
                ):
                    own[user] = None
                    frontier.append(user)
                    changed = True
    del own[wait]
    return sorted(own, key=order.__getitem__)


def _apply(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Reorder the nodes of a graph; the output stays last."""
    output = output_node(graph)
    for node in order:
        output.prepend(node)
