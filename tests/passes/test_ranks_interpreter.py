"""The interpreter of N ranks itself: what it computes, and the mistakes that it must notice."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.graph.fx_utils import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT
from tests.passes.graphs import GROUP, GraphBuilder
from tests.passes.ranks_interpreter import RanksError, run_ranks

aten = torch.ops.aten


def one_collective(target: object, *args: object, rows: int = 4) -> fx.GraphModule:
    builder = GraphBuilder()
    start = builder.call(target, builder.input("x", [rows]), *args)  # type: ignore[arg-type]
    return builder.finish(builder.call(WAIT, start))


def run_on_two(gm: fx.GraphModule) -> list[list[float]]:
    """The first output of each of two ranks, whose inputs are 0, 1, ... and 10, 11, ..."""
    rows = next(iter(gm.graph.nodes)).meta["val"].shape[0]
    inputs = [[torch.arange(rows) + 10.0 * rank] for rank in range(2)]
    return [output[0].tolist() for output in run_ranks([gm, gm], inputs)]


def test_a_gather_joins_the_ranks_rows():
    assert run_on_two(one_collective(ALL_GATHER, 2, GROUP, rows=1)) == [[0, 10], [0, 10]]


def test_an_all_reduce_adds():
    assert run_on_two(one_collective(ALL_REDUCE, "sum", GROUP, rows=2)) == [[10, 12], [10, 12]]


def test_a_reduce_scatter_adds_and_gives_each_rank_its_part():
    assert run_on_two(one_collective(REDUCE_SCATTER, "sum", 2, GROUP)) == [[10, 12], [14, 16]]


def test_an_exchange_sends_each_rank_its_split():
    gm = one_collective(ALL_TO_ALL, [2, 2], [2, 2], GROUP)
    assert run_on_two(gm) == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_an_output_read_before_its_wait_is_garbage():
    builder = GraphBuilder()
    start = builder.call(ALL_REDUCE, builder.input("x", [1]), "sum", GROUP)
    early = builder.call(aten.add.Tensor, start, 1.0)
    gm = builder.finish(early, builder.call(WAIT, start))
    (early_value, late_value), _ = run_ranks([gm, gm], [[torch.ones(1)]] * 2)
    assert early_value.isnan().all()
    assert late_value.tolist() == [2.0]


def test_an_input_written_in_flight_is_noticed():
    builder = GraphBuilder()
    x = builder.input("x", [1])
    start = builder.call(ALL_REDUCE, x, "sum", GROUP)
    builder.call(aten.add_.Tensor, x, 1.0)
    gm = builder.finish(builder.call(WAIT, start))
    with pytest.raises(RanksError, match="changed before the wait"):
        run_ranks([gm, gm], [[torch.ones(1)], [torch.ones(1)]])


def test_a_collective_nobody_waits_for_is_noticed():
    builder = GraphBuilder()
    gm = builder.finish(builder.call(ALL_REDUCE, builder.input("x", [1]), "sum", GROUP))
    with pytest.raises(RanksError, match="never waited for"):
        run_ranks([gm, gm], [[torch.ones(1)]] * 2)


def test_ranks_that_start_different_collectives_are_noticed():
    gather = one_collective(ALL_GATHER, 2, GROUP)
    reduce = one_collective(ALL_REDUCE, "sum", GROUP)
    with pytest.raises(RanksError, match=r"rank 0 starts .*all_gather.* rank 1 .*all_reduce"):
        run_ranks([gather, reduce], [[torch.ones(4)]] * 2)


def test_a_rank_that_returns_while_another_waits_is_noticed():
    builder = GraphBuilder()
    nothing = builder.finish(builder.input("x", [4]))
    with pytest.raises(RanksError, match=r"ranks \[0\] are done"):
        run_ranks([nothing, one_collective(ALL_REDUCE, "sum", GROUP)], [[torch.ones(4)]] * 2)


def test_a_value_that_contradicts_its_metadata_is_noticed():
    gm = one_collective(ALL_REDUCE, "sum", GROUP)
    with pytest.raises(RanksError, match=r"x says torch.float32\[4\] .* torch.float32\[5\]"):
        run_ranks([gm, gm], [[torch.ones(5)]] * 2)
