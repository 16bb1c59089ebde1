"""Small training steps: graphs with markers for any rank, their input values, and strategies.

A step reads its parameters in order, then makes a gradient for each trained parameter in reverse
order, as a forward and a backward do. Each value depends on all values before it, on the rank's
own batch, and on every gathered weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from passes.annotate.annotate_costs import annotate
from passes.graph.verifier import check
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.overlap.bucket_collectives import bucket
from passes.overlap.hierarchical_collectives import hierarchical
from passes.overlap.reorder_collectives import reorder
from passes.shard.lower_markers import shard
from passes.types.context import Context
from passes.types.decision import DECISIONS, FLAT_DECISIONS, Decision
from passes.types.plan import shardable
from tests.passes import graphs
from tests.passes.ranks_interpreter import run_ranks

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of a step.

    ``returned``: the gathered weight is an output too, as a weight kept gathered is.
    ``transposed``: its gradient has strides that no collective accepts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    decision: Decision = Decision.SHARD_REGATHER
    trained: bool = True
    returned: bool = False
    transposed: bool = False


#: Weights of several shapes and dtypes, with all flat decisions; tests append their own weights.
SEVERAL = (
    Weight((12, 3)),
    Weight((5, 2), decision=Decision.SHARD_KEEP, returned=True),
    Weight((7,), decision=Decision.REPLICATE),
    Weight((6,), torch.float64),
    Weight((3, 2), decision=Decision.REPLICATE, returned=True, transposed=True),
    Weight((3, 7, 2), transposed=True),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A small training step, its plan and its ranks.

    ``batch_rows``: rows of each rank's batch; they may differ between ranks (default: 4).
    ``again``: the backward regathers the weights whose decision says so.
    ``hosts``: with more than one, the ranks are a mesh of two dimensions.
    """

    weights: tuple[Weight, ...]
    world_size: int = 2
    bucket_bytes: int = 0
    uses_p2p: bool = False
    deciding: bool = False
    in_flight_bytes: int | None = None
    limit_bytes: int | None = None
    hardware: Any = dataclasses.field(default_factory=graphs.hardware)
    batch_rows: tuple[int, ...] = ()
    again: bool = False
    hosts: int = 1

    def names(self) -> list[str]:
        return [f"w{index}" for index in range(len(self.weights))]

    def context(self, rank: int) -> Context:
        parameters = [
            graphs.parameter(name, weight.shape, weight.dtype, weight.trained)
            for name, weight in zip(self.names(), self.weights, strict=True)
        ]
        decisions = dict(zip(self.names(), [w.decision for w in self.weights], strict=True))
        return graphs.context(
            parameters,
            decisions,
            world_size=self.world_size,
            rank=rank,
            bucket_bytes=self.bucket_bytes,
            in_flight_bytes=self.in_flight_bytes,
            uses_p2p=self.uses_p2p,
            deciding=self.deciding,
            limit_bytes=self.limit_bytes,
            hardware=self.hardware,
            mesh_dims=graphs.two_dimensions(self.hosts, self.world_size)
            if self.hosts > 1
            else None,
        )

    def groups(self) -> dict[str, list[list[int]]]:
        """The ranks of the process groups along each mesh dimension."""
        return graphs.ranks_along(self.hosts, self.world_size)

    def rows(self, rank: int) -> int:
        return self.batch_rows[rank] if self.batch_rows else 4

    def build(self, rank: int) -> fx.GraphModule:
        """The rank's graph, with markers."""
        builder, ctx = graphs.GraphBuilder(), self.context(rank)
        call = builder.call
        shards = [
            builder.parameter(name, self.local_shape(weight, rank), weight.dtype)
            for name, weight in zip(self.names(), self.weights, strict=True)
        ]
        state = builder.input("x", [self.rows(rank), 8])
        wholes: list[fx.Node] = []
        for name, weight, local in zip(self.names(), self.weights, shards, strict=True):
            sharded, marks = weight.decision.sharded, ctx.cut(weight.decision).marks
            whole = call(UNSHARD, local, name, list(weight.shape), sharded, *marks)
            wholes.append(whole)
            amount = call(aten.mean.default, call(aten._to_copy.default, whole, dtype=_F32))
            state = call(aten.sin.default, call(aten.add.Tensor, state, amount))
            state = call(aten.mm.default, state, call(aten.mm.default, call(aten.t, state), state))
        gradients: list[fx.Node | None] = [None] * len(shards)
        for index in reversed(range(len(shards))):
            weight, local, whole = self.weights[index], shards[index], wholes[index]
            if not weight.trained:
                continue
            sharded, marks = weight.decision.sharded, ctx.cut(weight.decision).marks
            if self.again and sharded and not weight.decision.keep:
                name = self.names()[index]
                whole = call(UNSHARD, local, name, list(weight.shape), sharded, *marks)
            amount = call(aten.mean.default, state)
            gradient = call(aten.mul.Tensor, whole, 2.0)
            if weight.transposed and len(weight.shape) > 1:
                turned = call(aten.transpose.int, gradient, 0, 1)
                copied = call(aten.clone.default, turned, memory_format=torch.contiguous_format)
                gradient = call(aten.transpose.int, copied, 0, 1)
            gradient = call(
                aten.add.Tensor, gradient, call(aten._to_copy.default, amount, dtype=weight.dtype)
            )
            reduced = call(REDUCE_GRAD, gradient, local, self.names()[index], sharded, *marks)
            gradients[index] = reduced
            state = call(
                aten.cos.default,
                call(aten.mm.default, state, call(aten.mm.default, call(aten.t, state), state)),
            )
        kept = [w for w, weight in zip(wholes, self.weights, strict=True) if weight.returned]
        return builder.finish(state, *gradients, *kept)

    def local_shape(self, weight: Weight, rank: int) -> list[int]:
        if not weight.decision.sharded:
            return list(weight.shape)
        return graphs.local_shape(weight.shape, *self.sharing(weight, rank))

    def sharing(self, weight: Weight, rank: int) -> tuple[int, int, int]:
        """Number of ranks that shard a weight, the rank's place among them, number of hosts."""
        each = self.world_size // self.hosts
        if weight.decision.within_host:
            return each, rank % each, 1
        within_hosts = any(other.decision.within_host for other in self.weights)
        return self.world_size, rank, self.hosts if within_hosts else 1

    def values(self) -> list[list[Tensor]]:
        """Each rank's inputs: its shards of weights that all ranks share, and its own batch."""
        generator = torch.Generator().manual_seed(7)
        wholes = [
            torch.randn(weight.shape, generator=generator).to(weight.dtype)
            for weight in self.weights
        ]
        inputs: list[list[Tensor]] = []
        for rank in range(self.world_size):
            mine = []
            for whole, weight in zip(wholes, self.weights, strict=True):
                if weight.decision.sharded:
                    first, last = graphs.local_rows(weight.shape[0], *self.sharing(weight, rank))
                    whole = whole[first:last].clone()
                mine.append(whole)
            inputs.append([*mine, torch.randn(self.rows(rank), 8, generator=generator) / 8])
        return inputs

    def lower(self, rank: int, *passes: Any) -> fx.GraphModule:
        """One rank's graph after these passes, checked at the end."""
        gm, ctx = self.build(rank), self.context(rank)
        for one in passes:
            gm = one(gm, ctx)
        check(gm, passes[-1].__name__ if passes else "none")
        return gm

    def lowered(self, *passes: Any) -> list[fx.GraphModule]:
        """Every rank's graph after these passes."""
        return [self.lower(rank, *passes) for rank in range(self.world_size)]

    def run(self, *passes: Any) -> list[tuple[Any, ...]]:
        """Every rank's outputs after these passes."""
        return run_ranks(self.lowered(*passes), self.values(), self.groups())


_F32 = torch.float32

#: The passes from markers to a schedule, in order.
LOWERING = (shard, bucket, hierarchical, annotate, reorder)


def assert_close(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Assert equality up to the rounding of a sum over ranks in the tensors' precision."""
    for one, other in zip(found, wanted, strict=True):
        coarse = isinstance(one, Tensor) and one.dtype is torch.bfloat16
        # Four terms up to about two, with eight bits each; a wrong element differs by about one.
        tolerance = {"rtol": 0.02, "atol": 0.06} if coarse else {}
        torch.testing.assert_close(one, other, **tolerance)


def assert_same_bits(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Assert bitwise equality: for passes that only move data."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


_DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])


@st.composite
def weights(draw: st.DrawFn, world_size: int, hosts: int = 1) -> Weight:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    allowed = list(FLAT_DECISIONS) if shardable(shape, world_size) else [Decision.REPLICATE]
    if hosts > 1 and shardable(shape, world_size // hosts):
        allowed += [decision for decision in DECISIONS if decision.within_host]
    return Weight(
        shape,
        draw(_DTYPES),
        draw(st.sampled_from(allowed)),
        trained=draw(st.sampled_from([True, True, True, False])),
        returned=draw(st.booleans()),
        transposed=draw(st.booleans()),
    )


@st.composite
def steps(draw: st.DrawFn, hosts: int = 1) -> Step:
    world_size = draw(st.sampled_from([4, 6, 8]) if hosts > 1 else st.integers(2, 4))
    return Step(
        tuple(draw(st.lists(weights(world_size, hosts), min_size=1, max_size=5))),
        world_size,
        bucket_bytes=draw(st.sampled_from([0, 64, 200, 600, 1 << 20])),
        uses_p2p=draw(st.booleans()),
        in_flight_bytes=draw(st.sampled_from([None, 0, 100, 500])),
        batch_rows=tuple(
            draw(st.lists(st.integers(1, 9), min_size=world_size, max_size=world_size))
        ),
        again=draw(st.booleans()),
        hosts=hosts,
    )
