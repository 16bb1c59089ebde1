"""Dynamic program: the cheapest decisions within a memory budget, on an additive cost model.

A choice d of parameter i takes m(i, d) bytes: its state, plus the gathered weight if that is kept.
It costs ``c(i, d) = wf * forward communication + wb * backward communication + computing``.
Computing is the optimizer step plus the compute overhead of the collectives. Memory has units of
1/1024 of the limit (or of the bytes of all parameters, if that is less). With parameters in
order::

    f[i][v] = min over d of f[i-1][v - m(i, d)] + c(i, d)

The weights (wf, wb) are the expected exposed shares of the forward's and the backward's
communication. The simulator, and not this model, decides which plan is the fastest
(``passes/plan/planner.py``).

Recurrence: the 0/1 knapsack of OSDP (arXiv 2209.13258, section 3.3) and Galvatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from passes.annotate.collectives import cost_on, stages_seconds
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.types.context import Context, MeshDim, Parameter
from passes.types.decision import DECISIONS, Decision
from passes.types.plan import shardable

#: Number of units of the limit, or of the most bytes of all parameters if that is less.
UNITS = 1024


@dataclasses.dataclass(frozen=True)
class Choice:
    """One decision for one parameter, with its own memory and costs."""

    decision: Decision
    memory_bytes: int
    forward_seconds: float
    backward_seconds: float
    compute_seconds: float


def choices_of(parameter: Parameter, ctx: Context) -> list[Choice]:
    """The possible decisions for a parameter: replicate first, the least memory last."""
    world, full = ctx.world_size, parameter.full_bytes
    trained = parameter.requires_grad

    # Small collectives share a bucket, and so most of the cost that does not depend on their size.
    spared = 1 - min(1.0, full / bucket_bytes_for(ctx))

    def link(kind: str, size_bytes: int = full, dim: MeshDim | None = None) -> float:
        """Seconds of a collective along a mesh dimension; ``dim=None``: over all ranks."""
        cost = cost_on(kind, size_bytes, ctx, dim)
        seconds = cost.seconds - spared * cost.latency_seconds
        if ctx.mesh_dims is None or dim or (kind == "reduce_scatter" and ctx.uses_p2p):
            return seconds
        latency_seconds = stages_seconds(kind, 0, ctx)
        return min(seconds, stages_seconds(kind, size_bytes, ctx) - spared * latency_seconds)

    def busy(kind: str, size_bytes: int = full, dim: MeshDim | None = None) -> float:
        cost = cost_on(kind, size_bytes, ctx, dim)
        return cost.overhead_seconds - spared * cost.start_seconds

    def sharded(
        keep: Decision, again: Decision, ranks: int, dim: MeshDim | None = None
    ) -> tuple[Choice, Choice]:
        """The two choices (keep gathered, regather) along a mesh dimension or over all ranks."""
        part, gather = parameter.state_bytes(ranks), ("all_gather", full, dim)
        reductions: list[tuple[str, int, MeshDim | None]] = []
        if trained:
            kinds = ["all_to_all"]
            if dim is None or not ctx.uses_p2p:  # with P2P, mesh dimensions lack this rate
                kinds.insert(0, "reduce_scatter")
            kind = min(kinds, key=lambda one: link(one, full, dim))
            reductions.append((kind, full, dim))
            if dim is not None and ctx.mesh_dims is not None:
                reductions.append(("all_reduce", parameter.shard_bytes(ranks), ctx.mesh_dims[0]))
        forward, backward = link(*gather), sum(link(*one) for one in reductions)
        computing = ctx.hardware.update_seconds(part, 1) + sum(
            busy(*one) for one in (gather, *reductions)
        )
        return (
            Choice(keep, part + full, forward, backward, computing),
            Choice(again, part, forward, forward + backward, computing + busy(*gather)),
        )

    whole = parameter.state_bytes(1)
    reduce_whole, occupied = (link("all_reduce"), busy("all_reduce")) if trained else (0.0, 0.0)
    compute_seconds = ctx.hardware.update_seconds(whole, 1) + occupied
    found = [Choice(Decision.REPLICATE, whole, 0.0, reduce_whole, compute_seconds)]
    if ctx.mesh_dims is not None and shardable(parameter.shape, ctx.mesh_dims[1].size):
        inner = ctx.mesh_dims[1]
        found += sharded(Decision.SHARD_HOST_KEEP, Decision.SHARD_HOST_REGATHER, inner.size, inner)
    if shardable(parameter.shape, world):
        found += sharded(Decision.SHARD_KEEP, Decision.SHARD_REGATHER, world)
    return found


def together(alike: Sequence[list[Choice]]) -> list[Choice]:
    """The joint choices of parameters that share one decision: sums over the parameters."""
    return [
        Choice(
            options[0].decision,
            sum(one.memory_bytes for one in options),
            sum(one.forward_seconds for one in options),
            sum(one.backward_seconds for one in options),
            sum(one.compute_seconds for one in options),
        )
        for options in zip(*alike, strict=True)
    ]


class Table:
    """The dynamic program for one weighting: the best decisions for any budget."""

    def __init__(
        self, choices: list[list[Choice]], weights: tuple[float, float], ctx: Context
    ) -> None:
        self.choices = choices
        self.most_bytes = sum(max(o.memory_bytes for o in options) for options in choices)
        whole = (
            self.most_bytes if ctx.limit_bytes is None else min(ctx.limit_bytes, self.most_bytes)
        )
        self.unit_bytes = max(1, whole // UNITS)
        self.units = whole // self.unit_bytes
        forward, backward = weights
        best = np.zeros(self.units + 1)
        self.picks = np.zeros((len(choices), self.units + 1), dtype=np.int8)
        # Rounding up would waste half a unit per parameter: carry the remainder over.
        self.sizes: list[list[int]] = []
        carried = dict.fromkeys(DECISIONS, 0.0)
        for index, options in enumerate(choices):
            sizes = []
            found = np.full((len(options), self.units + 1), np.inf)
            for pick, option in enumerate(options):
                exact = option.memory_bytes / self.unit_bytes + carried[option.decision]
                size = round(exact)
                carried[option.decision] = exact - size
                sizes.append(size)
                seconds = (
                    forward * option.forward_seconds
                    + backward * option.backward_seconds
                    + option.compute_seconds
                )
                if size <= self.units:
                    found[pick, size:] = best[: self.units + 1 - size] + seconds
            self.sizes.append(sizes)
            self.picks[index] = found.argmin(axis=0)
            best = found.min(axis=0)
        self.cost = best

    def best(self, budget_bytes: int) -> list[Decision] | None:
        """The cheapest decisions within the memory budget; None: no decisions fit."""
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
        """Bytes of some decisions in the additive model."""
        return sum(
            next(o.memory_bytes for o in options if o.decision == decision)
            for options, decision in zip(self.choices, decisions, strict=True)
        )
