"""Annotate: FLOPs, bytes, seconds and memory of every node, worked out by hand.

On the round hardware of these tests a FLOP and a byte of memory take a nanosecond each.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.annotate.annotate_costs import annotate, cost_of
from passes.graph.fx_utils import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from passes.ops.packing import FIRST_OF, MEAN_RANKS, PACK, PACK_COLUMNS, UNPACK
from passes.types.annotations import Cost
from passes.types.context import Context
from passes.types.learned import Learned
from tests.passes.graphs import GROUP, GraphBuilder, context, hardware

aten = torch.ops.aten


def annotated(b: GraphBuilder, *outputs: fx.Node, ctx: Context | None = None) -> None:
    annotate(b.finish(*outputs), ctx or context(world_size=4))


def test_a_matrix_product_takes_two_flops_for_each_multiplication():
    b = GraphBuilder()
    product = b.call(aten.mm.default, b.input("x", [10, 20]), b.input("w", [20, 30]))
    annotated(b, product)
    cost = cost_of(product)
    assert cost.flops == 2 * 10 * 20 * 30
    assert cost.read_bytes == 4 * (10 * 20 + 20 * 30)
    assert cost.write_bytes == cost.memory_bytes == 4 * 10 * 30
    assert cost.seconds == pytest.approx(12_000e-9)  # more than its 4400 bytes take


def test_a_kernel_with_little_to_compute_takes_as_long_as_its_bytes():
    b = GraphBuilder()
    product = b.call(aten.mm.default, b.input("x", [100, 1]), b.input("w", [1, 100]))
    annotated(b, product)
    assert cost_of(product).seconds == pytest.approx((800 + 40_000) * 1e-9)


def test_the_rate_is_that_of_the_results_type():
    fast = hardware(flops_per_second={"default": 1e9, "bfloat16": 1e12})
    b = GraphBuilder()
    x = b.input("x", [100, 100], torch.bfloat16)
    product = b.call(aten.mm.default, x, x)
    annotated(b, product, ctx=context(hardware=fast))
    # 2 million FLOPs in two microseconds: its 40,000 bytes (x is read once) take longer.
    assert cost_of(product).seconds == pytest.approx(40_000e-9)


def test_a_fused_chain_pays_for_what_enters_and_leaves_it():
    b = GraphBuilder()
    x, y = b.input("x", [1000]), b.input("y", [1000])
    first = b.call(aten.sin.default, x)
    second = b.call(aten.add.Tensor, first, y)
    third = b.call(aten.mul.Tensor, second, x)  # x has been read by this kernel
    annotated(b, third)
    assert [cost_of(n).read_bytes for n in (first, second, third)] == [4000, 4000, 0]
    assert [cost_of(n).write_bytes for n in (first, second, third)] == [0, 0, 4000]
    assert [cost_of(n).memory_bytes for n in (first, second, third)] == [0, 0, 4000]
    assert sum(cost_of(n).seconds for n in (first, second, third)) == pytest.approx(12_000e-9)


def test_a_fused_chain_is_launched_once():
    b = GraphBuilder()
    first = b.call(aten.sin.default, b.input("x", [1000]))
    second = b.call(aten.cos.default, first)
    annotated(b, second, ctx=context(hardware=hardware(launch_seconds=1.0)))
    assert cost_of(first).seconds < 1.0
    assert cost_of(second).seconds == pytest.approx(1.0, abs=1e-3)


def test_learned_factors_correct_torchs_own_kernels_and_all_others():
    b = GraphBuilder()
    x = b.input("x", [100, 100])
    product = b.call(aten.mm.default, x, x)
    fused = b.call(aten.sin.default, product)
    annotated(b, fused)
    before = cost_of(product).seconds, cost_of(fused).seconds
    learned = Learned(8, kernel_factor=2.0, fused_factor=3.0)
    annotate(fx.GraphModule({}, b.graph), context(hardware=hardware(in_force=learned)))
    assert cost_of(product).seconds == pytest.approx(2 * before[0])
    assert cost_of(fused).seconds == pytest.approx(3 * before[1])


def test_views_and_waits_cost_nothing():
    b = GraphBuilder()
    view = b.call(aten.t.default, b.input("x", [10, 10]))
    wait = b.call(WAIT, b.call(ALL_GATHER, b.input("p", [10]), 4, GROUP))
    annotated(b, view, wait)
    assert cost_of(view) == cost_of(wait) == Cost()


def test_an_embedding_reads_what_it_gives_and_not_its_table():
    b = GraphBuilder()
    table, rows = b.input("table", [100_000, 8]), b.input("rows", [256], torch.int64)
    found = b.call(aten.embedding.default, table, rows)
    annotated(b, found)
    assert cost_of(found).write_bytes == 256 * 8 * 4
    assert cost_of(found).read_bytes < 10 * 256 * 8 * 4


def test_a_copy_out_of_a_bucket_reads_its_own_columns_and_not_what_was_sent():
    b = GraphBuilder()
    bucket, sent = b.input("bucket", [4 * 1000]), b.input("sent", [1000])
    weight = b.call(UNPACK, bucket, 4, 0, [10, 20], sent)
    mean = b.call(MEAN_RANKS, bucket, 4, sent)
    first = b.call(FIRST_OF, bucket, 7, sent)
    packed = b.call(PACK, [sent, bucket])
    columns = b.call(PACK_COLUMNS, [sent], 4)
    annotated(b, weight, mean, first, packed, columns)
    read = [cost_of(node).read_bytes // 4 for node in (weight, mean, first, packed, columns)]
    assert read == [200, 4000, 7, 5000, 1000]
    assert cost_of(weight).seconds == pytest.approx(4 * (200 + 200) * 1e-9)


@pytest.mark.parametrize(
    ("target", "args", "numel", "wire_bytes"),
    [
        # Of 4000 bytes on 4 ranks each sends three quarters; an all-reduce sends them twice.
        (ALL_GATHER, (4, GROUP), 250, 3000),
        (REDUCE_SCATTER, ("sum", 4, GROUP), 1000, 3000),
        (ALL_REDUCE, ("sum", GROUP), 1000, 6000),
    ],
)
def test_a_collective_takes_its_latency_and_the_wires_time(
    target: object, args: tuple[object, ...], numel: int, wire_bytes: int
):
    b = GraphBuilder()
    start = b.call(target, b.input("p", [numel]), *args)  # type: ignore[arg-type]
    annotated(b, b.call(WAIT, start))
    assert cost_of(start).seconds == pytest.approx(1e-6 + wire_bytes * 1e-8)


def test_a_gather_takes_memory_and_an_all_reduce_none():
    b = GraphBuilder()
    p = b.input("p", [1000])
    gather, reduce = b.call(ALL_GATHER, p, 4, GROUP), b.call(ALL_REDUCE, p, "sum", GROUP)
    annotated(b, b.call(WAIT, gather), b.call(WAIT, reduce))
    assert cost_of(gather).memory_bytes == 16_000
    assert cost_of(reduce).memory_bytes == 0


def test_memory_is_rounded_up_as_the_allocator_does():
    b = GraphBuilder()
    x = b.input("x", [3])
    product = b.call(aten.mm.default, b.input("y", [5, 5]), b.input("z", [5, 5]))
    annotated(b, product, x, ctx=context(hardware=hardware(allocator_alignment_bytes=64)))
    assert cost_of(x).memory_bytes == 64
    assert cost_of(product).memory_bytes == 128


def test_the_graph_is_left_as_it_is():
    b = GraphBuilder()
    gm = b.finish(b.call(aten.sin.default, b.input("x", [3])))
    before = str(gm.graph)
    assert str(annotate(gm, context()).graph) == before
