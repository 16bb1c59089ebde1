"""Choices: the possible decisions for a parameter, with the seconds of each."""

from __future__ import annotations

import dataclasses

from passes.annotate.collectives import cost_on, stages_seconds
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.types.context import Context, MeshDim, Parameter
from passes.types.decision import Decision
from passes.types.plan import shardable


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
