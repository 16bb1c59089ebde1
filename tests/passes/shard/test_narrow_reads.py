"""Narrow: casts move before gathers only where every reader casts down, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.graph.fx_utils import ALL_GATHER, is_cast
from passes.graph.verifier import check
from passes.ops.markers import UNSHARD, unshards
from passes.shard.lower_markers import shard
from passes.shard.narrow_reads import narrow
from passes.types.decision import Decision
from tests.passes.graphs import GROUP, GraphBuilder, context, local_rows, local_shape, parameter
from tests.passes.ranks_interpreter import run_ranks

aten = torch.ops.aten
SHAPE = (5, 4)
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def step(reads: list[torch.dtype | None], rank: int = 0, sharded: bool = True) -> fx.GraphModule:
    """A weight read once for each dtype, None: as it is; the results."""
    builder = GraphBuilder()
    local = builder.parameter("w", local_shape(SHAPE, 2, rank) if sharded else list(SHAPE))
    whole = builder.call(UNSHARD, local, "w", list(SHAPE), sharded, GROUP)
    results = []
    for dtype in reads:
        cast = whole
        if dtype is not None:
            cast = builder.call(torch.ops.prims.convert_element_type.default, whole, dtype)
        results.append(builder.call(aten.sin.default, cast))
    return builder.finish(*results)


def ctx_of(rank: int, sharded: bool = True):
    decision = Decision.SHARD_REGATHER if sharded else Decision.REPLICATE
    return context([parameter("w", SHAPE)], {"w": decision}, world_size=2, rank=rank)


@pytest.mark.parametrize(
    ("reads", "dtype"),
    [
        ([BF16], BF16),
        ([BF16, BF16], BF16),
        ([F16], F16),
        ([BF16, None], None),
        ([BF16, F16], None),
        ([F64], None),
        ([torch.int8], None),
        ([None], None),
    ],
)
def test_only_what_all_readers_cast_down_to_one_dtype_is_cast_before(reads, dtype):
    gm = narrow(step(reads), ctx_of(0))
    check(gm, "narrow")
    (read,) = unshards(gm.graph)
    assert read.kwargs.get("dtype") == dtype
    assert read.meta["val"].dtype == (dtype or F32)
    assert any(map(is_cast, gm.graph.nodes)) == (dtype is None and reads != [None])


@pytest.mark.parametrize("sharded", [True, False])
def test_the_numbers_are_the_same_and_the_gather_is_of_half_the_bytes(sharded):
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    rows = [slice(*local_rows(SHAPE[0], 2, rank)) if sharded else slice(None) for rank in range(2)]
    values = [[whole[own]] for own in rows]
    plain = [shard(step([BF16, BF16], rank, sharded), ctx_of(rank, sharded)) for rank in range(2)]
    narrowed = [
        shard(
            narrow(step([BF16, BF16], rank, sharded), ctx_of(rank, sharded)), ctx_of(rank, sharded)
        )
        for rank in range(2)
    ]
    for found, wanted in zip(run_ranks(narrowed, values), run_ranks(plain, values), strict=True):
        assert all(map(torch.equal, found, wanted))
    for gm in narrowed:
        for gather in gm.graph.find_nodes(op="call_function", target=ALL_GATHER):
            assert gather.meta["val"].dtype == BF16
