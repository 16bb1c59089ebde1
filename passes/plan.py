"""The planner: which parameters to shard, so that the step is fastest under the memory limit.

The problem. For every parameter i choose d(i) in {replicate, shard and keep, shard and
gather again} to minimise the step's seconds subject to peak bytes <= limit. Both are what
the simulator says of the schedule that the passes emit; neither is a sum over parameters.

The method, in two levels:

1. *Dynamic programming over memory* on an additive model. A choice d of parameter i takes
   m(i, d) bytes (its state, plus the gathered weight if it is kept) and costs
   ``c(i, d) = wf * forward communication + wb * backward communication + optimizer traffic``.
   With memory cut into units of limit/1024 and parameters in order::

       f[i][v] = min over d of f[i-1][v - m(i, d)] + c(i, d)

   The weights (wf, wb) say how much of the forward's and the backward's communication is
   expected to be exposed: hidden communication costs nothing, so a plan may move bytes
   from the backward, where an all-reduce lies wholly, into the forward.
2. *The simulator decides.* For each weighting the budget v is lowered by what the simulated
   peak exceeds the limit by, until the plan fits; of all plans that fit the fastest
   simulated one is taken (the earlier one of equals).

Recurrence: the 0/1 knapsack of OSDP (arXiv 2209.13258, section 3.3) and Galvatron.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from passes.capture import Captured
from passes.context import Context, Parameter
from passes.decisions import Decision, ParameterPlan, Plan, shardable
from passes.pipeline import Pass
from passes.predict import Step, predict
from passes.units import format_bytes, format_seconds

_UNITS = 1024
_WEIGHTS = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.3, 1.0))
_MOST_TRIES = 6


class Infeasible(ValueError):
    """No plan fits; ``least_bytes`` is the smallest limit that would."""

    def __init__(self, limit_bytes: int, least: Step, world_size: int) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = least.prediction.peak_bytes
        filling = ", ".join(
            f"{kind} {format_bytes(size)}" for kind, size in least.prediction.peak.items()
        )
        super().__init__(
            f"memory_limit={format_bytes(limit_bytes)} is below the least possible "
            f"{format_bytes(self.least_bytes)} for this model on {world_size} ranks ({filling}). "
            "Raise it, use a smaller batch, or run on more ranks."
        )


@dataclasses.dataclass(frozen=True)
class _Choice:
    decision: Decision
    memory_bytes: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float


def bucket_bytes_for(ctx: Context) -> int:
    """Up to what size collectives travel together: where latency is a tenth of the transfer.

    A power of two from 64 KiB to 32 MiB.
    """
    rate = ctx.hardware.collectives["all_gather"]
    if rate.seconds_per_byte <= 0:
        return 1 << 25
    worth = 10 * rate.latency_seconds / rate.seconds_per_byte
    return 1 << min(25, max(16, math.ceil(math.log2(max(worth, 1)))))


def make_plan(
    captured: Captured, ctx: Context, passes: Sequence[Pass], read: frozenset[str] | None = None
) -> Plan:
    """The fastest plan under ``ctx.limit_bytes`` (None: no limit). See the module's docstring.

    ``read``: the parameters the captured graphs read (None: all). The others (behind a graph
    break) are sharded only if memory asks for it.

    Raises:
        Infeasible: if even the plan that takes the least memory is above the limit.
    """
    empty = Plan(
        (),
        world_size=ctx.world_size,
        memory_limit_bytes=ctx.limit_bytes,
        bucket_bytes=bucket_bytes_for(ctx),
    )
    choices = [_choices(parameter, ctx) for parameter in ctx.parameters]

    def price(decisions: Sequence[Decision]) -> tuple[Plan, Step]:
        plan = empty.replace(parameters=_rows(ctx, decisions))
        return plan, predict(captured, plan, ctx, passes)

    priced: dict[tuple[Decision, ...], tuple[Plan, Step]] = {}

    def look(decisions: Sequence[Decision]) -> tuple[Plan, Step]:
        key = tuple(decisions)
        if key not in priced:
            priced[key] = price(key)
        return priced[key]

    def fits(step: Step) -> bool:
        return ctx.limit_bytes is None or step.prediction.peak_bytes <= ctx.limit_bytes

    look([options[0].decision for options in choices])  # replicate everything
    for weights in _WEIGHTS:
        table = _Table(choices, weights, ctx)
        budget = table.most_bytes
        if ctx.limit_bytes is not None:
            budget = min(budget, ctx.limit_bytes)
        for _ in range(_MOST_TRIES):
            decisions = table.best(budget)
            if decisions is None:
                break
            _, step = look(decisions)
            if fits(step):
                break
            assert ctx.limit_bytes is not None
            used = table.memory_bytes(decisions)
            over = step.prediction.peak_bytes - ctx.limit_bytes
            budget = min(budget, used) - max(over, table.unit_bytes)
    if not any(fits(step) for _, step in priced.values()):
        look([options[-1].decision for options in choices])
        # Of a small model keeping may take less: a second gather can be in flight at the peak.
        look([options[min(1, len(options) - 1)].decision for options in choices])
        look([min(options, key=lambda o: o.memory_bytes).decision for options in choices])
    feasible = [(plan, step) for plan, step in priced.values() if fits(step)]
    if not feasible:
        least = min((step for _, step in priced.values()), key=lambda s: s.prediction.peak_bytes)
        assert ctx.limit_bytes is not None
        raise Infeasible(ctx.limit_bytes, least, ctx.world_size)
    plan, step = min(feasible, key=lambda pair: pair[1].prediction.step_seconds)
    return _explained(plan, step, ctx)


def _choices(parameter: Parameter, ctx: Context) -> list[_Choice]:
    """What can be done with a parameter; replicate first, the least memory last."""
    world, hardware, full = ctx.world_size, ctx.hardware, parameter.full_bytes
    trained = parameter.requires_grad

    def link(kind: str) -> float:
        rate = hardware.collectives[kind]
        # Small collectives share a bucket and so most of the latency.
        share = min(1.0, full / bucket_bytes_for(ctx))
        return hardware.collective_seconds(kind, full, world) - (1 - share) * rate.latency_seconds

    def update(state: int) -> float:
        return 4.0 * state / hardware.memory_bytes_per_second

    whole, part = parameter.state_bytes(world, False), parameter.state_bytes(world, True)
    reduce_whole = link("all_reduce") if trained else 0.0
    found = [_Choice(Decision.REPLICATE, whole, 0.0, reduce_whole, update(whole))]
    if shardable(parameter.shape, world):
        gather = link("all_to_all" if ctx.by_exchange else "all_gather")
        reduce = min(link("reduce_scatter"), link("all_to_all")) if trained else 0.0
        found.append(_Choice(Decision.SHARD_KEEP, part + full, gather, reduce, update(part)))
        found.append(_Choice(Decision.SHARD_AGAIN, part, gather, gather + reduce, update(part)))
    return found


class _Table:
    """The dynamic programme for one weighting: the best decisions for any budget."""

    def __init__(
        self, choices: list[list[_Choice]], weights: tuple[float, float], ctx: Context
    ) -> None:
        self.choices = choices
        self.most_bytes = sum(max(o.memory_bytes for o in options) for options in choices)
        whole = (
            self.most_bytes if ctx.limit_bytes is None else min(ctx.limit_bytes, self.most_bytes)
        )
        self.unit_bytes = max(1, whole // _UNITS)
        self.units = whole // self.unit_bytes
        forward, backward = weights
        best = np.zeros(self.units + 1)
        self.picks = np.zeros((len(choices), self.units + 1), dtype=np.int8)
        # Rounding each parameter up would waste half a unit a parameter: carry the remainder.
        self.sizes: list[list[int]] = []
        carried = [0.0, 0.0, 0.0]
        for index, options in enumerate(choices):
            sizes = []
            found = np.full((len(options), self.units + 1), np.inf)
            for pick, option in enumerate(options):
                exact = option.memory_bytes / self.unit_bytes + carried[pick]
                size = round(exact)
                carried[pick] = exact - size
                sizes.append(size)
                seconds = (
                    forward * option.forward_seconds
                    + backward * option.backward_seconds
                    + option.optimizer_seconds
                )
                if size <= self.units:
                    found[pick, size:] = best[: self.units + 1 - size] + seconds
            self.sizes.append(sizes)
            self.picks[index] = found.argmin(axis=0)
            best = found.min(axis=0)
        self.cost = best

    def best(self, budget_bytes: int) -> list[Decision] | None:
        """The cheapest decisions whose additive memory is within the budget; None if none is."""
        left = min(self.units, budget_bytes // self.unit_bytes)
        if left < 0 or not np.isfinite(self.cost[left]):
            return None
        picked: list[Decision] = []
        for index in range(len(self.choices) - 1, -1, -1):
            pick = int(self.picks[index, left])
            picked.append(self.choices[index][pick].decision)
            left -= self.sizes[index][pick]
        return picked[::-1]

    def memory_bytes(self, decisions: Sequence[Decision]) -> int:
        """Additive memory of some decisions."""
        return sum(
            next(o.memory_bytes for o in options if o.decision is decision)
            for options, decision in zip(self.choices, decisions, strict=True)
        )


def _rows(ctx: Context, decisions: Sequence[Decision]) -> tuple[ParameterPlan, ...]:
    world = ctx.world_size
    return tuple(
        ParameterPlan(
            p.name,
            p.shape,
            p.dtype,
            decision,
            p.state_bytes(world, False) - p.state_bytes(world, decision.sharded),
        )
        for p, decision in zip(ctx.parameters, decisions, strict=True)
    )


def _explained(plan: Plan, step: Step, ctx: Context) -> Plan:
    """The plan with its prediction and, for every parameter, why."""
    gathers: dict[str, tuple[float, float]] = {}
    reductions: dict[str, tuple[float, float]] = {}
    for simulation in step.simulations:
        for node, late in simulation.exposed.items():
            purpose = node.meta["collective"]
            seconds = simulation.end[node] - simulation.start[node]
            kind = gathers if purpose.gathers else reductions
            for name in purpose.names:
                before = kind.get(name, (0.0, 0.0))
                kind[name] = (before[0] + seconds, before[1] + late)
    rows = []
    for row in plan.parameters:
        parts = []
        if not shardable(row.shape, ctx.world_size):
            parts.append("too small to shard")
        elif row.decision is Decision.REPLICATE:
            parts.append("fits whole")
        for what, kind in (("gather", gathers), ("reduce", reductions)):
            if row.name in kind:
                seconds, late = kind[row.name]
                hidden = "hidden" if late < 0.05 * seconds else f"{format_seconds(late)} exposed"
                parts.append(f"{what} {format_seconds(seconds)}, {hidden}")
        rows.append(dataclasses.replace(row, reason="; ".join(parts)))
    return plan.replace(parameters=tuple(rows), prediction=step.prediction)
