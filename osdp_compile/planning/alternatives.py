"""Alternatives: common plans with one decision for all parameters, to compare a plan with."""

from __future__ import annotations

import dataclasses

from osdp_compile.planning.traced_step import folded_if_large, if_enough, uniform_plan
from passes.graph.captured import Captured
from passes.pipeline import Pass
from passes.plan.planner import complete
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import Plan

#: The plans for comparison, by their names; the last one needs a mesh of two dimensions.
ALTERNATIVES = {
    "DDP: replicate all": Decision.REPLICATE,
    "ZeRO-2: shard all, keep": Decision.SHARD_KEEP,
    "FSDP: shard all, regather": Decision.SHARD_REGATHER,
    "HSDP: shard within hosts, regather": Decision.SHARD_HOST_REGATHER,
}


def alternatives_for(ctx: Context) -> dict[str, Decision]:
    """The decisions that are possible on a context's ranks, by name."""
    flat = ctx.mesh_dims is None
    return {
        name: decision
        for name, decision in ALTERNATIVES.items()
        if not (flat and decision.within_host)
    }


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedStep:
    """The captured step on which this rank searched the plan in force.

    ``ctx``: the planner's, without a plan.
    """

    captured: Captured
    ctx: Context
    passes: tuple[Pass, ...]

    def alternatives(self) -> dict[str, Plan]:
        """The alternatives with their best schedules without a limit, and their predictions."""
        ctx = self.ctx.replace(limit_bytes=None)
        step = if_enough(folded_if_large(self.captured, ctx.parameters), ctx) or self.captured
        return {
            name: complete(uniform_plan(decision, ctx), step, ctx, self.passes)
            for name, decision in alternatives_for(ctx).items()
        }
