"""Bucket: what travels together, and that nothing else changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from torch import fx

from passes.annotate.annotate_costs import collective_full_bytes
from passes.graph.fx_utils import COLLECTIVES, WAIT, is_collective, root_of
from passes.graph.metadata import COLLECTIVE, GRADIENT_OF
from passes.graph.op_traits import effective_users
from passes.overlap.bucket_collectives import bucket
from passes.shard.lower_markers import shard
from passes.types.decision import Decision
from passes.types.plan import Collective
from tests.passes.examples import examples
from tests.passes.steps import SEVERAL, Step, Weight, assert_same_bits, steps

aten = torch.ops.aten
MANY = 1 << 20

MIXED = Step(
    (
        *SEVERAL,
        Weight((5,), torch.float64, trained=False),
    ),
    bucket_bytes=MANY,
)


def labels(gm: fx.GraphModule) -> list[tuple[str, str]]:
    """Kind and purpose of every collective, in order."""
    return [
        (COLLECTIVES[node.target], COLLECTIVE.of(node).label)
        for node in gm.graph.nodes
        if is_collective(node)
    ]


def bucketed(*weights: Weight, bucket_bytes: int = MANY, **changes: object) -> fx.GraphModule:
    step = Step(weights, bucket_bytes=bucket_bytes, **changes)  # type: ignore[arg-type]
    return step.lower(0, shard, bucket)


@pytest.mark.parametrize("uses_p2p", [False, True], ids=["gather", "exchange"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_buckets_change_no_bit(world_size: int, uses_p2p: bool):
    step = dataclasses.replace(MIXED, world_size=world_size, uses_p2p=uses_p2p)
    together, apart = step.run(shard, bucket), step.run(shard)
    for found, wanted in zip(together, apart, strict=True):
        assert_same_bits(found, wanted)
    # Or nothing was shown: there must be fewer, larger collectives.
    assert len(labels(step.lower(0, shard, bucket))) < len(labels(step.lower(0, shard)))


@examples(14)
@given(steps())
def test_buckets_change_no_bit_of_any_step(step: Step):
    for found, wanted in zip(step.run(shard, bucket), step.run(shard), strict=True):
        assert_same_bits(found, wanted)


@examples(8)
@given(steps())
def test_only_what_is_alone_may_be_above_the_buckets_size(step: Step):
    for gm in step.lowered(shard, bucket):
        for node in gm.graph.nodes:
            if is_collective(node) and len(COLLECTIVE.of(node).names) > 1:
                assert collective_full_bytes(node) <= step.bucket_bytes


@examples(8)
@given(steps())
def test_every_parameter_is_still_served_once_each_way(step: Step):
    def served(gm: fx.GraphModule) -> list[tuple[str, bool]]:
        purposes = [COLLECTIVE.of(n) for n in gm.graph.nodes if is_collective(n)]
        return sorted((name, p.gathers) for p in purposes for name in p.names)

    assert served(step.lower(0, shard, bucket)) == served(step.lower(0, shard))


def test_small_gathers_travel_together_in_order_of_use_and_gradients_in_order_of_readiness():
    assert labels(bucketed(Weight((4,)), Weight((6, 2)), Weight((8,)))) == [
        ("all_gather", "gather w0+w1+w2"),
        ("reduce_scatter", "reduce w2+w1+w0"),
    ]


def test_a_full_bucket_is_closed_and_the_next_begun():
    # 16, 32 and 24 bytes: the first two fill 48.
    gm = bucketed(Weight((4,)), Weight((8,)), Weight((6,)), bucket_bytes=48)
    assert labels(gm)[:2] == [("all_gather", "gather w0+w1"), ("all_gather", "gather w2")]


def test_what_reaches_the_buckets_size_travels_alone_and_uncopied():
    gm = bucketed(Weight((4,)), Weight((16, 4)), Weight((8,)), bucket_bytes=256)
    assert ("all_gather", "gather w1") in labels(gm)
    alone = Collective(("w1",), gathers=True)
    big = next(n for n in gm.graph.nodes if COLLECTIVE.get(n) == alone)
    assert root_of(big.args[0]).name == "w1"  # type: ignore[arg-type]
    (reader,) = [n for n in effective_users(big) if n.target is aten._to_copy.default]
    assert root_of(reader.args[0]) is big  # type: ignore[arg-type]


def test_types_do_not_share_a_bucket():
    gm = bucketed(Weight((4,)), Weight((4,), torch.float64), Weight((4,)))
    assert labels(gm)[:2] == [("all_gather", "gather w0+w2"), ("all_gather", "gather w1")]


def test_replicated_and_sharded_gradients_do_not_share_a_bucket():
    replicated = Weight((4,), decision=Decision.REPLICATE)
    gm = bucketed(Weight((4,)), replicated, Weight((6,)), replicated)
    assert sorted(labels(gm)) == [
        ("all_gather", "gather w0+w2"),
        ("all_reduce", "reduce w3+w1"),
        ("reduce_scatter", "reduce w2+w0"),
    ]


def test_one_small_collective_alone_is_left_as_it_is():
    step = Step((Weight((5, 2)),), bucket_bytes=MANY)
    before = [str(node.target) for node in step.lower(0, shard).graph.nodes]
    assert [str(node.target) for node in step.lower(0, shard, bucket).graph.nodes] == before


def test_no_bucket_at_a_size_of_zero():
    step = dataclasses.replace(MIXED, bucket_bytes=0)
    assert all("+" not in label for _, label in labels(step.lower(0, shard, bucket)))


def test_gradients_leave_an_all_reduces_bucket_as_views_of_it():
    replicated = Weight((4,), decision=Decision.REPLICATE)
    gm = bucketed(replicated, replicated)
    gradients = list(gm.graph.output_node().args[0])[1:]  # type: ignore[arg-type]
    (reduced,) = [n for n in gm.graph.nodes if n.target is WAIT]
    assert {root_of(gradient) for gradient in gradients} == {root_of(reduced)}  # type: ignore[arg-type]


def test_gradients_still_say_whose_they_are():
    gm = dataclasses.replace(MIXED, bucket_bytes=MANY).lower(0, shard, bucket)
    gradients = list(gm.graph.output_node().args[0])[1:7]  # type: ignore[arg-type]
    assert [GRADIENT_OF.get(g) for g in gradients] == [f"w{i}" for i in range(6)]  # type: ignore[union-attr]


def test_ranks_with_other_batches_and_other_rows_pack_the_same():
    step = dataclasses.replace(MIXED, world_size=4, batch_rows=(1, 9, 4, 2))
    first, *others = [labels(gm) for gm in step.lowered(shard, bucket)]
    assert all(other == first for other in others)
