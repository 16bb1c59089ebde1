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
from passes.graph.dataflow import Wiring
from passes.graph.fx_utils import ALL_REDUCE, COLLECTIVES, output_node, positions, root_of
from passes.graph.metadata import AFTER_WAIT, COLLECTIVE, DRAINED, HELD_BACK, MEMORY, WIRING
from passes.graph.op_traits import is_fusible
from passes.overlap.list_scheduler import Frame, Job, Room, Scheduler, is_compute, moved
from passes.simulate.exposure import Reason
from passes.simulate.memory import Course, MemoryModel
from passes.types.context import Context
from passes.types.plan import Collective

#: How often less room is tried before nothing is in flight at all.
_ROOM_TRIES = 6


def reorder(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Schedule the collectives. See the module's docstring."""
    graph = gm.graph
    jobs = _jobs(graph)
    if not jobs:
        return gm
    original = list(graph.nodes)
    sequence = None if ctx.deciding else _sequence(original, jobs, ctx)
    total = _total_bytes(jobs)
    bound = ctx.plan.in_flight_bytes
    cap = allowed = total if bound is None else bound
    memory = MemoryModel(gm.meta.get(WIRING) or Wiring(graph))
    free_bytes = _free_bytes(graph, jobs, memory, ctx)
    frame = Frame(original, jobs, _seconds)
    spare_bytes = 0  # of the room, to be on the safe side
    output = output_node(graph)
    tried: list[tuple[Course, Scheduler]] = []
    course: Course | None = None
    while True:
        room = None if free_bytes is None else Room([free - spare_bytes for free in free_bytes])
        scheduler = Scheduler(frame, cap, sequence, room)
        order = scheduler.run()
        if ctx.limit_bytes is None:
            break
        course = memory.course([*order, output])
        tried.append((course, scheduler))
        above_bytes = ctx.base_bytes + course.peak_bytes - ctx.limit_bytes
        if above_bytes <= 0:
            break
        if cap == 0:
            course, scheduler = min(tried, key=lambda one: one[0].peak_bytes)
            break
        spare_bytes += above_bytes
        if len(tried) >= _ROOM_TRIES or (room is not None and not room.any_at_first):
            cap = 0  # where there was no room at all, less of it gives the same schedule
    _apply(graph, scheduler.result)
    if ctx.deciding and course is None:
        course = memory.course([*scheduler.result, output])
    if course is not None:
        gm.meta[MEMORY] = memory.described(course)
    if not ctx.deciding:
        graph.lint()
    for job in jobs:
        job.start.meta[HELD_BACK] = _held_back(job, scheduler, allowed)
        job.start.meta[DRAINED] = job in scheduler.drained
    return gm


def _held_back(job: Job, scheduler: Scheduler, allowed_bytes: int) -> Reason:
    """Why a collective started no earlier; ``allowed_bytes``: the plan's in-flight limit."""
    if job not in scheduler.held_back:
        return Reason.MEMORY if job in scheduler.drained else Reason.ORDER
    if scheduler.cap_bytes < allowed_bytes:
        return Reason.MEMORY  # nothing is in flight because the memory limit leaves no room
    return scheduler.held_back[job]


def _free_bytes(
    graph: fx.Graph, jobs: list[Job], memory: MemoryModel, ctx: Context
) -> list[int] | None:
    """What the limit leaves at each compute node while every collective is on the spot."""
    if ctx.limit_bytes is None:
        return None
    mine = moved(jobs)
    free_bytes: list[int] = []
    for node, alive_bytes in zip(graph.nodes, memory.course().curve, strict=True):
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


def _sequence(original: list[fx.Node], jobs: list[Job], ctx: Context) -> list[Job]:
    """The order in which the collectives start, the same for every batch size."""
    planned = ctx.plan.order_for(ctx.phase.value, [job.purpose for job in jobs])
    if planned is not None:
        by_purpose = {job.purpose: job for job in jobs}
        # Where the mesh has no levels, what the plan has in legs is flat: the first of them.
        own = [one for one in planned if one.leg == 0 or one in by_purpose]
        return [by_purpose[purpose] for purpose in own]
    # As much computing as communication, evenly spread over what is no fused kernel.
    kernels = {n for n in original if n.op == "call_function" and not is_fusible(n)}
    each = sum(cost_of(job.start).seconds for job in jobs) / max(1, len(kernels))
    total = _total_bytes(jobs)
    bound = ctx.plan.in_flight_bytes
    frame = Frame(original, jobs, lambda node: each if node in kernels else 0.0)
    order = Scheduler(frame, total if bound is None else bound).run()
    by_start = {job.start: job for job in jobs}
    return [by_start[node] for node in order if node in by_start]


def _jobs(graph: fx.Graph) -> list[Job]:
    order = positions(graph)
    jobs = []
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
        jobs.append(
            Job(
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
    _join_legs(jobs)
    return jobs


def _join_legs(jobs: list[Job]) -> None:
    """Tell legs which one they follow; all have the bytes of the largest and the last one's use."""
    latest: dict[Collective, Job] = {}
    for job in jobs:
        latest[job.purpose] = job
        if job.purpose.leg:
            former = latest[dataclasses.replace(job.purpose, leg=job.purpose.leg - 1)]
            job.follows, former.then = former, job
            job.bytes = max(job.bytes, former.bytes)
    for job in reversed(jobs):  # from each last leg to the first
        if job.then is not None:
            job.bytes, job.first_use = job.then.bytes, job.then.first_use


def _total_bytes(jobs: list[Job]) -> int:
    return sum(job.bytes for job in jobs if job.follows is None)


def _extra_bytes(start: fx.Node, before: list[fx.Node]) -> int:
    """What a gather's early start, or a reduction's late wait, keeps alive; see :class:`Job`."""
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
