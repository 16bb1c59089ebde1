"""What a collective costs: on a process group, along a mesh dimension, in stages.

The only file that turns a kind and bytes into seconds. A graph's collectives get their cost here
(``annotate``), and so do those that passes and the planner only consider.

Formula: ``latency + wire bytes x inverse bandwidth`` on the network (``Hardware``), and a compute
overhead beside it.
"""

from __future__ import annotations

import dataclasses

from passes.types.context import Context, MeshDim


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """The cost of one collective.

    ``seconds``: on the network. ``overhead_seconds``: on the compute stream.
    ``start_delay_seconds``, ``lateness``: if nothing is in flight at its start.
    ``latency_seconds``, ``start_seconds``: the parts of the first two that do not depend on its
    size. Collectives that share a bucket share them.
    """

    seconds: float
    overhead_seconds: float
    start_delay_seconds: float
    lateness: float
    latency_seconds: float
    start_seconds: float

    @property
    def total_seconds(self) -> float:
        """Network and compute stream one after the other."""
        return self.seconds + self.overhead_seconds


def cost_on(
    kind: str, full_bytes: int, ctx: Context, where: str | MeshDim | None = None
) -> CollectiveCost:
    """The cost of a collective.

    ``kind``: as in ``Hardware.collectives``. ``full_bytes``: of the whole tensor over all ranks.
    ``where``: a process group's name, a mesh dimension, or None for all ranks.
    """
    if where is None:
        hardware, ranks = ctx.hardware, ctx.world_size
    elif isinstance(where, MeshDim):
        hardware, ranks = ctx.along(where)
    else:
        hardware, ranks = ctx.network(where)
    if ranks == 1:  # the profile of one process has no rates
        return CollectiveCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    rate, learned = hardware.collectives[kind], hardware.in_force
    return CollectiveCost(
        hardware.collective_seconds(kind, full_bytes, ranks),
        hardware.compute_overhead_seconds(kind, full_bytes, ranks),
        hardware.start_delay_seconds(kind, ranks),
        learned.lateness,
        rate.latency_seconds * learned.network_factor,
        rate.start_seconds * learned.overhead_factor,
    )


def stages_of(kind: str, full_bytes: int, ctx: Context) -> list[tuple[str, MeshDim, int]]:
    """The stages of a hierarchical collective: (kind, mesh dimension, full bytes) of each.

    ``kind``, ``full_bytes``: of the flat collective.
    """
    assert ctx.mesh_dims is not None
    outer, inner = ctx.mesh_dims
    part_bytes = full_bytes // inner.size
    if kind == "all_gather":
        return [(kind, outer, part_bytes), (kind, inner, full_bytes)]
    if kind == "all_reduce":
        scatter = "all_to_all" if ctx.uses_p2p else "reduce_scatter"
        return [
            (scatter, inner, full_bytes),
            (kind, outer, part_bytes),
            ("all_gather", inner, full_bytes),
        ]
    return [(kind, inner, full_bytes), (kind, outer, part_bytes)]


def costs_in_stages(kind: str, full_bytes: int, ctx: Context) -> list[CollectiveCost]:
    """The cost of each stage of a hierarchical collective, without copies."""
    stages = stages_of(kind, full_bytes, ctx)
    return [cost_on(stage, size_bytes, ctx, dim) for stage, dim, size_bytes in stages]


def stages_seconds(kind: str, full_bytes: int, ctx: Context) -> float:
    """Seconds of all stages on the network, one after the other, without copies."""
    return sum(cost.seconds for cost in costs_in_stages(kind, full_bytes, ctx))


def by_all_to_all(full_bytes: int, group: str, ctx: Context) -> bool:
    """Whether an all-to-all and a local sum are faster than a reduce-scatter."""
    if ctx.uses_p2p:
        return True
    _, ranks = ctx.network(group)
    scatter = cost_on("reduce_scatter", full_bytes, ctx, group)
    exchange = cost_on("all_to_all", full_bytes, ctx, group)
    sum_seconds = full_bytes * (1 + 1 / ranks) / ctx.hardware.memory_bytes_per_second
    return exchange.seconds + sum_seconds < scatter.seconds
