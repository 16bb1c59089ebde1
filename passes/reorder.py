"""Reorder: start collectives early, wait for them late, never above the memory limit.

Needs: an annotated graph whose collectives are started and waited for on the spot.
Leaves: the same nodes in another order.

Before::                                  After::

    a = wait(gather(p)); x = mm(x, a)         s = gather(p); t = gather(q)
    b = wait(gather(q)); x = mm(x, b)         a = wait(s); x = mm(x, a)
    r = wait(reduce(g)); ...                  b = wait(t); x = mm(x, b)

The pass walks the compute nodes with a clock for the network beside that of the compute.
Whenever the network would run dry it starts the next collective: a gather that is urgent
(its data would come late), else a gradient that is ready, else a gather further ahead, as
long as the bytes in flight stay under a cap. A reduction is waited for when it has ended,
or at once when the cap is reached. The largest cap is taken whose simulated peak stays
under the limit: overlap is given up before memory.

All ranks must start the same collectives in the same order, also those whose batch is
smaller and whose clock runs otherwise. So the order is decided once, while planning
(``ctx.deciding``), and followed from then on (``plan.order``). For a graph that the plan
has no order for, the clock counts kernels and not what they cost.
"""

from __future__ import annotations

from torch import fx

from passes.annotate import collective_full_bytes, cost_of
from passes.context import Context
from passes.decisions import Collective
from passes.fusion import is_fusible
from passes.graph import COLLECTIVES, output_node, positions
from passes.schedule import Job, Scheduler
from passes.simulate import simulate


def reorder(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Schedule the collectives. See the module's docstring."""
    graph = gm.graph
    jobs = _jobs(graph)
    if not jobs:
        return gm
    original = list(graph.nodes)
    sequence = None if ctx.deciding else _sequence(original, jobs, ctx)
    total = sum(job.bytes for job in jobs)
    cap = ctx.plan.in_flight_bytes if ctx.plan.in_flight_bytes is not None else total
    tried: list[tuple[int, list[fx.Node]]] = []
    while True:
        schedule = Scheduler(original, jobs, cap, _seconds, sequence).run()
        _apply(graph, schedule)
        if ctx.limit_bytes is None:
            return gm
        tried.append((simulate(graph).peak_bytes, schedule))
        if ctx.base_bytes + tried[-1][0] <= ctx.limit_bytes:
            return gm
        if cap == 0:
            break
        cap = cap // 2 if cap > total // 64 else 0
    _apply(graph, min(tried, key=lambda peak_and_schedule: peak_and_schedule[0])[1])
    return gm


def order_of(graph: fx.Graph) -> tuple[Collective, ...]:
    """What the collectives of a graph are for, in the order they start."""
    return tuple(n.meta["collective"] for n in graph.nodes if "collective" in n.meta)


def _seconds(node: fx.Node) -> float:
    return cost_of(node).seconds


def _sequence(original: list[fx.Node], jobs: list[Job], ctx: Context) -> list[Job]:
    """The order in which the collectives start, the same for every batch size."""
    planned = ctx.plan.order_for(ctx.phase.value, [job.purpose for job in jobs])
    if planned is not None:
        by_purpose = {job.purpose: job for job in jobs}
        return [by_purpose[purpose] for purpose in planned]
    # As much computing as communication, evenly spread over what is no fused kernel.
    kernels = {n for n in original if n.op == "call_function" and not is_fusible(n)}
    each = sum(cost_of(job.start).seconds for job in jobs) / max(1, len(kernels))
    total = sum(job.bytes for job in jobs)
    bound = ctx.plan.in_flight_bytes
    order = Scheduler(
        original,
        jobs,
        total if bound is None else bound,
        lambda node: each if node in kernels else 0.0,
    ).run()
    by_start = {job.start: job for job in jobs}
    return [by_start[node] for node in order if node in by_start]


def _jobs(graph: fx.Graph) -> list[Job]:
    order = positions(graph)
    jobs = []
    for start in graph.nodes:
        if start.target not in COLLECTIVES or "collective" not in start.meta:
            continue
        (wait,) = start.users
        gathers = start.meta["collective"].gathers
        before = _preparation(start, order) if gathers else []
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
                first_use,
            )
        )
    return jobs


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
    reduction also what a user's pass does with one gradient.
    """
    own: dict[fx.Node, None] = {wait: None}
    sent = set(wait.all_input_nodes[0].all_input_nodes)
    changed = True
    frontier = [wait]
    while changed:
        changed = False
        for node in list(frontier):
            for user in node.users:
                if user in own or user.op != "call_function":
                    continue
                moves = not only_marked or "after_wait" in user.meta
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
    graph.lint()
