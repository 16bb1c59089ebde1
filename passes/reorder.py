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

import dataclasses
from collections.abc import Callable

from torch import fx

from passes.annotate import collective_full_bytes, cost_of
from passes.check import InvalidGraph
from passes.context import Context
from passes.fusion import is_fusible
from passes.graph import COLLECTIVES, output_node, positions
from passes.simulate import simulate

#: A gather is urgent once the time left before its use is below this many times its own.
_URGENT = 1.5


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
        schedule = _schedule(original, jobs, cap, _seconds, sequence)
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


def order_of(graph: fx.Graph) -> tuple[str, ...]:
    """What the collectives of a graph are for, in the order they start."""
    return tuple(_label(node) for node in graph.nodes if "collective" in node.meta)


def _label(start: fx.Node) -> str:
    label: str = start.meta["collective"].label
    return label


def _seconds(node: fx.Node) -> float:
    return cost_of(node).seconds


def _sequence(original: list[fx.Node], jobs: list[_Job], ctx: Context) -> list[_Job]:
    """The order in which the collectives start, the same for every batch size."""
    planned = ctx.plan.order.get(ctx.phase.value, ())
    by_label = {_label(job.start): job for job in jobs}
    if len(by_label) == len(jobs) and sorted(planned) == sorted(by_label):
        return [by_label[label] for label in planned]
    # As much computing as communication, evenly spread over what is no fused kernel.
    kernels = {n for n in original if n.op == "call_function" and not is_fusible(n)}
    each = sum(job.seconds for job in jobs) / max(1, len(kernels))
    total = sum(job.bytes for job in jobs)
    bound = ctx.plan.in_flight_bytes
    order = _schedule(
        original,
        jobs,
        total if bound is None else bound,
        lambda node: each if node in kernels else 0.0,
        None,
    )
    by_start = {job.start: job for job in jobs}
    return [by_start[node] for node in order if node in by_start]


@dataclasses.dataclass
class _Job:
    """One collective: what must run before it starts, itself, and what follows its wait."""

    before: list[fx.Node]
    start: fx.Node
    wait: fx.Node
    after: list[fx.Node]
    gathers: bool
    seconds: float
    bytes: int
    first_use: fx.Node | None = None


def _jobs(graph: fx.Graph) -> list[_Job]:
    order = positions(graph)
    jobs = []
    for start in graph.nodes:
        if start.target not in COLLECTIVES or "collective" not in start.meta:
            continue
        (wait,) = start.users
        gathers = start.meta["collective"].gathers
        before = _preparation(start, order) if gathers else []
        after = _unpacking(wait, order)
        own = {wait, *after}
        readers = [user for node in own for user in node.users if user not in own]
        first_use = min(readers, key=order.__getitem__, default=output_node(graph))
        jobs.append(
            _Job(
                before,
                start,
                wait,
                after,
                gathers,
                cost_of(start).seconds,
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


def _unpacking(wait: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """What a wait's tensor goes through before anything of the model or the output reads it."""
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
                fresh = "after_wait" in user.meta
                if fresh and all(
                    source in own or source in sent or source.op == "placeholder"
                    for source in user.all_input_nodes
                ):
                    own[user] = None
                    frontier.append(user)
                    changed = True
    del own[wait]
    return sorted(own, key=order.__getitem__)


def _schedule(
    original: list[fx.Node],
    jobs: list[_Job],
    cap_bytes: int,
    seconds: Callable[[fx.Node], float],
    sequence: list[_Job] | None,
) -> list[fx.Node]:
    """The new order of all nodes but the output.

    ``seconds``: what a compute node takes. ``sequence``: the order in which the collectives
    must start (None: the best that is found).
    """
    mine = {n for job in jobs for n in (*job.before, job.start, job.wait, *job.after)}
    compute = [n for n in original if n not in mine and n.op not in ("placeholder", "output")]
    order = {node: index for index, node in enumerate(original)}
    clock: dict[fx.Node, float] = {}
    now = 0.0
    for node in compute:
        clock[node] = now
        now += seconds(node)
    finish = now
    gathers = sorted(
        (j for j in jobs if j.gathers),
        key=lambda j: (order[j.first_use or j.wait], order[j.start]),
    )
    reductions = [j for j in jobs if not j.gathers]
    ready_after = {id(j): _ready_after(j, mine, order) for j in reductions}

    result = [n for n in original if n.op == "placeholder"]
    placed: set[fx.Node] = set()
    free_at = 0.0  # when the network has done everything started so far
    ends: dict[int, float] = {}
    flying: list[_Job] = []  # reductions started and not waited for
    ahead_bytes = 0  # gathered and not yet used
    flying_bytes = 0
    next_gather = 0
    pending: list[_Job] = []
    waiting: dict[int, _Job] = {}  # gathers started and not waited for, by id

    def begin(job: _Job, now: float) -> None:
        nonlocal free_at, ahead_bytes, flying_bytes
        result.extend(node for node in job.before if node not in placed)
        placed.update(job.before)
        result.append(job.start)
        free_at = max(free_at, now) + job.seconds
        ends[id(job)] = free_at
        if job.gathers:
            ahead_bytes += job.bytes
            waiting[id(job)] = job
        else:
            flying.append(job)
            flying_bytes += job.bytes

    def finish_job(job: _Job) -> None:
        nonlocal ahead_bytes, flying_bytes
        result.append(job.wait)
        result.extend(job.after)
        if job.gathers:
            ahead_bytes -= job.bytes
            del waiting[id(job)]
        else:
            flying.remove(job)
            flying_bytes -= job.bytes

    now = 0.0
    use_of: dict[fx.Node, list[_Job]] = {}
    for job in gathers:
        assert job.first_use is not None
        use_of.setdefault(job.first_use, []).append(job)
    ready_at: dict[fx.Node | None, list[_Job]] = {}
    for job in reductions:
        ready_at.setdefault(ready_after[id(job)], []).append(job)
    pending.extend(ready_at.get(None, []))
    in_line = iter(sequence or ())
    head = next(in_line, None)

    def next_in_line() -> bool:
        """Start what is next in the given sequence, if it can start now."""
        nonlocal head, next_gather
        if head is None:
            return False
        if head.gathers:
            if ahead_bytes and ahead_bytes + head.bytes > cap_bytes:
                return False
            next_gather += 1
        else:
            if head not in pending:
                return False
            if flying_bytes and flying_bytes + head.bytes > cap_bytes:
                return False
            pending.remove(head)
        job, head = head, next(in_line, None)
        begin(job, now)
        return True

    def force_up_to(job: _Job) -> None:
        """Start a collective that must start now, and all that are before it in line."""
        nonlocal head, next_gather
        while id(job) not in ends:
            if sequence is None:
                first = gathers[next_gather] if job.gathers else pending[0]
            else:
                assert head is not None
                first, head = head, next(in_line, None)
            if first.gathers:
                next_gather += 1
            elif first in pending:
                pending.remove(first)
            else:
                raise InvalidGraph(
                    f"pass 'reorder': {_label(first.start)!r} cannot start before "
                    f"{_label(job.start)!r}, as the plan's order says: the plan was made for "
                    "another model; make it again"
                )
            begin(first, now)

    slip = 0.0  # how far stalls have pushed the clock behind the stall-free one

    for node in compute:
        for job in use_of.get(node, ()):
            force_up_to(job)
            if id(job) in waiting:
                stall = max(0.0, ends[id(job)] - now)
                now += stall
                slip += stall
                finish_job(job)
        # Keep the network busy while this node runs.
        until = now + seconds(node)
        while free_at <= until:
            if sequence is not None:
                if cap_bytes > 0 and next_in_line():
                    continue
                break
            gather = gathers[next_gather] if next_gather < len(gathers) else None
            if gather is not None:
                use_clock = clock.get(gather.first_use, finish) + slip  # type: ignore[arg-type]
                left = use_clock - max(free_at, now)
                room = ahead_bytes == 0 or ahead_bytes + gather.bytes <= cap_bytes
                if room and left <= _URGENT * gather.seconds:
                    begin(gather, now)
                    next_gather += 1
                    continue
            if pending and (flying_bytes == 0 or flying_bytes + pending[0].bytes <= cap_bytes):
                begin(pending.pop(0), now)
                continue
            if gather is not None and room and cap_bytes > 0:
                begin(gather, now)
                next_gather += 1
                continue
            break
        result.append(node)
        now = until
        for job in ready_at.get(node, ()):
            pending.append(job)
            if cap_bytes == 0:
                force_up_to(job)
                stall = max(0.0, ends[id(job)] - now)
                now += stall
                slip += stall
                finish_job(job)
        for job in list(flying):
            if ends[id(job)] <= now:
                finish_job(job)
            else:
                break
        # Gradients that wait in line take memory too: above the cap, stall for the oldest.
        while flying and flying_bytes + sum(j.bytes for j in pending) > cap_bytes:
            job = flying[0]
            stall = max(0.0, ends[id(job)] - now)
            now += stall
            slip += stall
            finish_job(job)
    for job in sequence or [*gathers, *pending]:
        if id(job) not in ends:
            force_up_to(job)
    for job in gathers:
        if id(job) in waiting:
            finish_job(job)
    for job in list(flying):
        finish_job(job)
    return result


def _ready_after(job: _Job, mine: set[fx.Node], order: dict[fx.Node, int]) -> fx.Node | None:
    """The last compute node a reduction depends on; None if it depends on placeholders only."""
    inputs = [n for n in job.start.all_input_nodes if n.op == "call_function" and n not in mine]
    return max(inputs, key=order.__getitem__, default=None)


def _apply(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Put the nodes in this order; the output stays last."""
    output = output_node(graph)
    for node in order:
        output.prepend(node)
    graph.lint()
