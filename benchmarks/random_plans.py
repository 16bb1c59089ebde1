"""Random plans that fit under a limit, by the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator

from osdp_compile.planning.traced_step import TracedStep, predicted
from passes.annotate.training_state import state_bytes
from passes.candidates.recompute_sets import recompute_sets
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.planner import complete
from passes.pricing.evaluator import RECOMPUTE_SETS
from passes.types.context import Context
from passes.types.decision import FLAT_DECISIONS, Decision
from passes.types.plan import ParameterPlan, Plan, shardable

#: Of the size that latency asks for.
_BUCKETS = (0.25, 1.0, 4.0)
#: How many plans are drawn, and how many of these are lowered, for each that is wanted.
_MOST_DRAWN, _MOST_PRICED = 1000, 20


def random_plans(step: TracedStep, ctx: Context, count: int, seed: int) -> list[Plan]:
    """So many different ones that fit, with order and prediction; fewer where they are rare.

    Each has its own odds of the three decisions, drawn evenly from all there are, so that plans
    near the uniform ones are among them; half of the plans decide for each parameter, and half
    for all that are alike. Half recompute nothing, the others one of the planner's sets.
    """
    found: list[Plan] = []
    seen: set[object] = set()
    draw, priced = random.Random(seed), 0
    for plan in _drawn(step, ctx, draw, count * _MOST_DRAWN):
        if len(found) == count or priced == count * _MOST_PRICED:
            break
        key = (plan.parameters, plan.recompute, plan.bucket_bytes)
        if key in seen or not _may_fit(ctx, plan):
            continue
        seen.add(key)
        priced += 1
        plan = complete(plan, step.captured, ctx, step.passes)
        if ctx.limit_bytes is None or predicted(plan).peak_bytes <= ctx.limit_bytes:
            found.append(plan)
    return found


def _may_fit(ctx: Context, plan: Plan) -> bool:
    """Whether what is held between steps leaves anything of the limit."""
    return ctx.limit_bytes is None or sum(state_bytes(ctx, plan).values()) <= ctx.limit_bytes


def _drawn(step: TracedStep, ctx: Context, draw: random.Random, most: int) -> Iterator[Plan]:
    sets = recompute_sets(step.captured, ctx, RECOMPUTE_SETS)
    bucket_bytes = bucket_bytes_for(ctx)
    for _ in range(most):
        odds = [draw.expovariate(1.0) for _ in FLAT_DECISIONS]  # even over all odds
        tied = draw.random() < 0.5
        decided: dict[object, Decision] = {}
        rows = []
        for one in ctx.parameters:
            alike = _alike(one.name) if tied else one.name
            (drawn,) = draw.choices(FLAT_DECISIONS, odds)
            decision = decided.setdefault(alike, drawn)
            if not shardable(one.shape, ctx.world_size):
                decision = Decision.REPLICATE
            rows.append(ParameterPlan(one.name, one.shape, one.dtype, decision))
        chosen = draw.choice(sets) if sets and draw.random() < 0.5 else None
        yield Plan(
            tuple(rows),
            world_size=ctx.world_size,
            memory_limit_bytes=ctx.limit_bytes,
            bucket_bytes=round(bucket_bytes * draw.choice(_BUCKETS)),
            recompute=chosen.recompute if chosen else (),
            also_save=chosen.also_save if chosen else (),
        )


def _alike(name: str) -> str:
    """The same for all layers."""
    return ".".join(part for part in name.split(".") if not part.isdigit())
