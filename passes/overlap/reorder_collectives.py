"""Reorder: start collectives early, wait for them late, never above the memory limit.

Needs: an annotated graph whose collectives are started and waited for on the spot.
Leaves: the same nodes in another order.

Before::                                  After::

    a = wait(gather(p)); x = mm(x, a)         s = gather(p); t = gather(q)
    b = wait(gather(q)); x = mm(x, b)         a = wait(s); x = mm(x, a)
    r = wait(reduce(g)); ...                  b = wait(t); x = mm(x, b)

The pass walks the compute nodes with a clock for the network beside that of the compute.
Whenever the network would run dry soon it starts the next collective: a gather that is urgent
(its data would come late), else a gradient that is ready, else a gather further ahead, as
long as there is room. Soon is the next kernel's or wait's time and the collective's own besides:
no clock is right. Where no gather is left, gradients start as soon as they are ready. A reduction
is waited for when it has ended, or at once when there is no room for its gradient. The room at
each node is what the limit leaves there while every collective is on the spot. If the simulated
peak is above the limit all the same, less room is tried, and in the end nothing is in flight:
overlap is given up before memory.

All ranks must start the same collectives in the same order, also those whose batch is
smaller and whose clock runs otherwise. So the order is decided once, while planning
(``ctx.deciding``), and followed from then on (``plan.order``). For a graph that the plan
has no order for, the clock counts kernels and not what they cost. It is one order for all process
groups: if it were one for each, ranks could wait for each other's other group.

The legs of a collective (``passes/overlap/hierarchical_collectives.py``) are collectives of their
own, each of which can start when the former has been waited for.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from passes.annotate.annotate_costs import collective_full_bytes, cost_of
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import ALL_REDUCE, COLLECTIVES, output_node, positions, root_of
from passes.graph.metadata import AFTER_WAIT, COLLECTIVE, DATAFLOW, DRAINED, HELD_BACK, MEMORY
from passes.graph.op_traits import is_fusible
from passes.overlap.list_scheduler import (
    CollectiveTask,
    Headroom,
    ScheduleProblem,
    Scheduler,
    is_compute,
    moved,
)
from passes.simulate.exposure import Reason
from passes.simulate.memory import MemoryModel, MemoryTrace
from passes.types.context import Context
from passes.types.plan import Collective

#: How often less room is tried before nothing is in flight at all.
_ROOM_TRIES = 6


def reorder(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Schedule the collectives. See the module's docstring."""
    graph = gm.graph
    tasks = _jobs(graph)
    if not tasks:
        return gm
    original = list(graph.nodes)
    sequence = None if ctx.deciding else _sequence(original, tasks, ctx)
    total = _total_bytes(tasks)
    bound = ctx.plan.in_flight_bytes
    cap = allowed = total if bound is None else bound
    memory = MemoryModel(gm.meta.get(DATAFLOW) or Dataflow(graph))
    free_bytes = _free_bytes(graph, tasks, memory, ctx)
    problem = ScheduleProblem(original, tasks, _seconds)
    spare_bytes = 0  # of the room, to be on the safe side
    output = output_node(graph)
    tried: list[tuple[MemoryTrace, Scheduler]] = []
    trace: MemoryTrace | None = None
    while True:
        headroom = (
            None if free_bytes is None else Headroom([free - spare_bytes for free in free_bytes])
        )
        scheduler = Scheduler(problem, cap, sequence, headroom)
        order = scheduler.run()
        if ctx.limit_bytes is None:
            break
        trace = memory.trace([*order, output])
        tried.append((trace, scheduler))
        above_bytes = ctx.base_bytes + trace.peak_bytes - ctx.limit_bytes
        if above_bytes <= 0:
            break
        if cap == 0:
            trace, scheduler = min(tried, key=lambda one: one[0].peak_bytes)
            break
        spare_bytes += above_bytes
        if len(tried) >= _ROOM_TRIES or (headroom is not None and not headroom.any_at_first):
            cap = 0  # where there was no room at all, less of it gives the same schedule
    _apply(graph, scheduler.result)
    if ctx.deciding and trace is None:
        trace = memory.trace([*scheduler.result, output])
    if trace is not None:
        gm.meta[MEMORY] = memory.described(trace)
    if not ctx.deciding:
        graph.lint()
    for task in tasks:
        task.start.meta[HELD_BACK] = _held_back(task, scheduler, allowed)
        task.start.meta[DRAINED] = task in scheduler.drained
    return gm


def _held_back(task: CollectiveTask, scheduler: Scheduler, allowed_bytes: int) -> Reason:
    """Why a collective started no earlier; ``allowed_bytes``: the plan's in-flight limit."""
    if task not in scheduler.held_back:
        return Reason.MEMORY if task in scheduler.drained else Reason.ORDER
    if scheduler.cap_bytes < allowed_bytes:
        return Reason.MEMORY  # nothing is in flight because the memory limit leaves no room
    return scheduler.held_back[task]


def _free_bytes(
    graph: fx.Graph, tasks: list[CollectiveTask], memory: MemoryModel, ctx: Context
) -> list[int] | None:
    """What the limit leaves at each compute node while every collective is on the spot."""
    if ctx.limit_bytes is None:
        return None
    mine = moved(tasks)
    free_bytes: list[int] = []
    for node, alive_bytes in zip(graph.nodes, memory.trace().curve, strict=True):
        left = ctx.limit_bytes - ctx.base_bytes - alive_bytes
        if is_compute(node, mine):
            free_bytes.append(left)
        elif free_bytes:  # a collective on the spot after it: it may be more than the node takes
            free_bytes[-1] = min(free_bytes[-1], left)
    return free_bytes


def order_of(graph: fx.Graph) -> tuple[Collective, ...]:
    """What the collectives of a graph are for, in the order they start."""
    return tuple(n.meta[COLLECTIVE] for n in graph.nodes if COLLECTIVE in n.meta)


def _seconds(node: fx.Node) -> float:
    return cost_of(node).seconds


def _sequence(
    original: list[fx.Node], tasks: list[CollectiveTask], ctx: Context
) -> list[CollectiveTask]:
    """The order in which the collectives start, the same for every batch size."""
    planned = ctx.plan.order_for(ctx.phase.value, [task.purpose for task in tasks])
    if planned is not None:
        by_purpose = {task.purpose: task for task in tasks}
        # Where the mesh has no levels, what the plan has in legs is flat: the first of them.
        own = [one for one in planned if one.leg == 0 or one in by_purpose]
        return [by_purpose[purpose] for purpose in own]
    # As much computing as communication, evenly spread over what is no fused kernel.
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
        if start.target not in COLLECTIVES or COLLECTIVE not in start.meta:
            continue
        (wait,) = start.users
        gathers = start.meta[COLLECTIVE].gathers
        prepared = gathers and start.meta[COLLECTIVE].leg == 0
        before = _preparation(start, order) if prepared else []
        after = _following(wait, order, only_marked=gathers)
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
                _extra_bytes(start, before),
                0 if gathers else cost_of(start).memory_bytes + cost_of(start).workspace_bytes,
                first_use,
            )
        )
    _join_legs(tasks)
    return tasks


def _join_legs(tasks: list[CollectiveTask]) -> None:
    """Tell legs which one they follow; all have the bytes of the largest and the last one's use."""
    latest: dict[Collective, CollectiveTask] = {}
    for task in tasks:
        latest[task.purpose] = task
        if task.purpose.leg:
            former = latest[dataclasses.replace(task.purpose, leg=task.purpose.leg - 1)]
            task.follows, former.then = former, task
            task.bytes = max(task.bytes, former.bytes)
    for task in reversed(tasks):  # from each last leg to the first
        if task.then is not None:
            task.bytes, task.first_use = task.then.bytes, task.then.first_use


def _total_bytes(tasks: list[CollectiveTask]) -> int:
    return sum(task.bytes for task in tasks if task.follows is None)


def _extra_bytes(start: fx.Node, before: list[fx.Node]) -> int:
    """Bytes that a gather's early start, or a reduction's late wait, keeps alive."""
    if start.meta[COLLECTIVE].gathers:
        copied_bytes = cost_of(start).workspace_bytes
        return copied_bytes + sum(cost_of(node).memory_bytes for node in (start, *before))
    # What is sent is there longer; an all-reduce works in place.
    sent = root_of(start.args[0])  # type: ignore[arg-type]
    return 0 if start.target is ALL_REDUCE else cost_of(sent).memory_bytes


def _preparation(start: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """What a gather needs computed first: the pads and copies of parameters that only it reads."""
    chain: dict[fx.Node, None] = {}
    stack = [start]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source.op == "call_function" and source not in chain:
                chain[source] = None
                stack.append(source)
    return sorted(chain, key=order.__getitem__)


def _following(wait: fx.Node, order: dict[fx.Node, int], only_marked: bool) -> list[fx.Node]:
    """What a wait's tensor goes through on its own: it moves with the wait.

    Of a gather only what the passes marked (``after_wait``): the rest is the model. Of a
    reduction also what a user's pass does with one gradient. The next leg moves by itself.
    """
    own: dict[fx.Node, None] = {wait: None}
    sent = set(wait.all_input_nodes[0].all_input_nodes)
    changed = True
    frontier = [wait]
    while changed:
        changed = False
        for node in list(frontier):
            for user in node.users:
                if user in own or user.op != "call_function" or COLLECTIVE in user.meta:
                    continue
                moves = not only_marked or AFTER_WAIT in user.meta
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
    """Put the nodes in this order; the output stays last."""
    output = output_node(graph)
    for node in order:
        output.prepend(node)
