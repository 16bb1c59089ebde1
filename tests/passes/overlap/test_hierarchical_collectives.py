"""Hierarchical collectives: the same values, where the profile says they are faster."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given as given_any
from torch import fx, nn

from passes.annotate.annotate_costs import annotate, cost_of
from passes.annotate.collectives import stages_seconds
from passes.graph.fx_utils import COLLECTIVES, group_of, is_collective
from passes.graph.metadata import COLLECTIVE
from passes.ops.packing import UNPACK
from passes.overlap.bucket_collectives import bucket
from passes.overlap.hierarchical_collectives import hierarchical
from passes.overlap.reorder_collectives import order_of, reorder
from passes.pipeline import default_passes
from passes.plan.planner import make_plan
from passes.shard.lower_markers import shard
from passes.types.decision import Decision
from passes.types.hardware import Hardware, LinkRate
from passes.types.plan import Collective, Plan
from tests.chosen import thorough
from tests.passes.captures import capture_step
from tests.passes.examples import examples
from tests.passes.graphs import GROUP, INNER, OUTER, hardware, two_dimensions, with_mesh_dims
from tests.passes.steps import (
    LOWERING,
    SEVERAL,
    Step,
    Weight,
    assert_close,
    assert_same_bits,
    steps,
)

MANY = 1 << 20
#: Stages are always faster.
FAST = with_mesh_dims(
    hardware(memory_bytes_per_second=1e12), LinkRate(1e-9, 1e-11), LinkRate(1e-9, 1e-11)
)

MIXED = Step(
    (
        *SEVERAL,
        Weight((16, 2)),
        Weight((2, 4), torch.bfloat16, decision=Decision.REPLICATE),
        Weight((5,), torch.float64, trained=False),
    ),
    world_size=4,
    hosts=2,
    hardware=FAST,
)


def by_all_to_all(given: Hardware) -> Hardware:
    """The profile of a backend whose reduce-scatter is slow, so that gradients go all-to-all."""
    slow = {**given.collectives, "reduce_scatter": LinkRate(1.0, 1.0)}
    return dataclasses.replace(given, collectives=slow)


def stages(gm: fx.GraphModule) -> list[tuple[str, str, str]]:
    """Kind, group and purpose of every collective, in order."""
    return [
        (COLLECTIVES[node.target], group_of(node), COLLECTIVE.of(node).label)
        for node in gm.graph.nodes
        if is_collective(node)
    ]


def in_stages(gm: fx.GraphModule) -> set[Collective]:
    return {one.first for one in order_of(gm.graph) if one.stage}


@pytest.mark.parametrize(
    ("world_size", "hosts", "bucket_bytes", "changes"),
    [
        (6, 3, 100, {"uses_p2p": True}),
        (4, 2, 100, {}),
        *thorough((4, 2, 0, {"uses_p2p": True}), (8, 4, MANY, {"uses_p2p": True}), (6, 2, 0, {})),
        *thorough((6, 3, MANY, {"hardware": by_all_to_all(FAST)})),
        *thorough((4, 2, 0, {"hardware": by_all_to_all(FAST), "in_flight_bytes": 0})),
    ],
)
def test_stage_by_stage_gives_what_flat_collectives_give(world_size, hosts, bucket_bytes, changes):
    step = dataclasses.replace(
        MIXED, world_size=world_size, hosts=hosts, bucket_bytes=bucket_bytes, **changes
    )
    for found, wanted in zip(step.run(*LOWERING), step.run(shard, bucket), strict=True):
        assert_close(found, wanted)
    flat, stage_by_stage = step.lower(0, shard, bucket), step.lower(0, shard, bucket, hierarchical)
    assert in_stages(stage_by_stage) == set(order_of(flat.graph)), "not all went stage by stage"


@pytest.mark.parametrize("uses_p2p", [False, True], ids=["gather", "exchange"])
def test_what_is_gathered_stage_by_stage_is_the_same_to_the_last_bit(uses_p2p: bool):
    untrained = [dataclasses.replace(w, trained=False, returned=True) for w in MIXED.weights]
    step = dataclasses.replace(MIXED, weights=tuple(untrained), uses_p2p=uses_p2p, world_size=8)
    for found, wanted in zip(step.run(*LOWERING), step.run(shard), strict=True):
        assert_same_bits(found, wanted)


def test_stages_go_along_the_dimensions_in_the_order_that_sends_least_between_hosts():
    replicated = Weight((8,), decision=Decision.REPLICATE)
    step = dataclasses.replace(MIXED, weights=(Weight((8,)), replicated), uses_p2p=True)
    assert stages(step.lower(0, shard, bucket, hierarchical)) == [
        ("all_gather", OUTER, "gather w0"),
        ("all_gather", INNER, "gather w0, stage 2"),
        ("all_to_all", INNER, "reduce w1"),
        ("all_reduce", OUTER, "reduce w1, stage 2"),
        ("all_gather", INNER, "reduce w1, stage 3"),
        ("all_to_all", INNER, "reduce w0"),
        ("all_to_all", OUTER, "reduce w0, stage 2"),
    ]


def test_each_stage_costs_what_its_own_dimension_takes_for_its_own_size():
    # 4 ranks on 2 hosts: 64 bytes in all, 32 between hosts.
    given = with_mesh_dims(FAST, LinkRate(1.0, 3.0), LinkRate(2.0, 5.0))
    slow = dict.fromkeys(given.collectives, LinkRate(1000.0, 1.0))
    step = dataclasses.replace(
        MIXED,
        weights=(Weight((16,), trained=False),),
        hardware=dataclasses.replace(given, collectives=slow),
    )
    gm = step.lower(0, shard, bucket, hierarchical, annotate)
    seconds = [cost_of(node).seconds for node in gm.graph.nodes if is_collective(node)]
    assert seconds == [1.0 + 3.0 * 32 / 2, 2.0 + 5.0 * 64 / 2]
    assert stages_seconds("all_gather", 64, step.context(0)) == sum(seconds)


def test_only_what_is_faster_stage_by_stage_goes_so():
    # Flat: 1 us and 10 ns a wire byte. Stages: 10 us each; between hosts and within one 1 ns.
    given = with_mesh_dims(
        hardware(memory_bytes_per_second=1e12), LinkRate(1e-5, 1e-9), LinkRate(1e-5, 1e-9)
    )
    small, large = Weight((64,)), Weight((64, 64))
    step = dataclasses.replace(
        MIXED, weights=(small, large), hardware=given, uses_p2p=True, bucket_bytes=0
    )
    gm = step.lower(0, shard, bucket, hierarchical)
    assert in_stages(gm) == {Collective(("w1",), True), Collective(("w1",), False)}


def test_copies_count():
    # Between the stages a gradient is laid out anew, on a memory as slow as the network.
    fast, slow = (
        with_mesh_dims(
            hardware(memory_bytes_per_second=rate), LinkRate(1e-6, 5e-9), LinkRate(1e-6, 1e-10)
        )
        for rate in (1e12, 1e8)
    )
    step = dataclasses.replace(MIXED, weights=(Weight((64, 64)),), uses_p2p=True)
    assert in_stages(dataclasses.replace(step, hardware=fast).lower(0, shard, bucket, hierarchical))
    assert not in_stages(
        dataclasses.replace(step, hardware=slow).lower(0, shard, bucket, hierarchical)
    )


def test_what_starting_a_stage_takes_counts():
    def started(seconds: float) -> Step:
        stages_rate = LinkRate(1e-6, 1e-10, start_seconds=seconds)
        given = with_mesh_dims(hardware(memory_bytes_per_second=1e12), stages_rate, stages_rate)
        return dataclasses.replace(MIXED, weights=(Weight((64, 64)),), hardware=given)

    assert in_stages(started(1e-6).lower(0, shard, bucket, hierarchical))
    assert not in_stages(started(1e-3).lower(0, shard, bucket, hierarchical))


def test_without_levels_nothing_changes():
    step = dataclasses.replace(MIXED, hosts=1)
    gm = step.lower(0, shard, bucket)
    before = list(gm.graph.nodes)
    assert list(hierarchical(gm, step.context(0)).graph.nodes) == before


def test_the_plans_stages_are_followed_whatever_the_profile_says():
    step = dataclasses.replace(MIXED, uses_p2p=True, deciding=True, bucket_bytes=100)
    ctx = step.context(0)
    decided = step.lower(0, *LOWERING)
    plan = ctx.plan.replace(order={"forward": order_of(decided.graph)})
    never = with_mesh_dims(FAST, LinkRate(1.0, 1.0), LinkRate(1.0, 1.0))
    following = ctx.replace(plan=plan, hardware=never, deciding=False)
    gm = reorder(
        annotate(hierarchical(bucket(shard(step.build(0), ctx), following), following), following),
        following,
    )
    assert order_of(gm.graph) == order_of(decided.graph)


def test_a_plan_with_stages_runs_flat_where_the_mesh_has_no_levels():
    step = dataclasses.replace(MIXED, uses_p2p=True, deciding=True)
    plan_order = order_of(step.lower(0, *LOWERING).graph)
    flat = dataclasses.replace(step, hosts=1, deciding=False)
    ctx = flat.context(0)
    ctx = ctx.replace(plan=ctx.plan.replace(order={"forward": plan_order}))
    gm = flat.build(0)
    for one in LOWERING:
        gm = one(gm, ctx)
    assert order_of(gm.graph) == tuple(one for one in plan_order if one.stage == 0)
    assert {group for _, group, _ in stages(gm)} == {GROUP}


@pytest.mark.parametrize("planned", [True, False])
def test_ranks_with_other_batches_start_the_same_in_the_same_order(planned: bool):
    step = dataclasses.replace(MIXED, uses_p2p=True, batch_rows=(1, 900, 4, 50))
    order = {}
    if planned:
        decided = dataclasses.replace(step, deciding=True).lower(0, *LOWERING)
        order = {"forward": order_of(decided.graph)}
    found = []
    for rank in range(step.world_size):
        gm, ctx = step.build(rank), step.context(rank)
        ctx = ctx.replace(plan=ctx.plan.replace(order=order))
        for one in LOWERING:
            gm = one(gm, ctx)
        found.append(order_of(gm.graph))
    assert len(set(found)) == 1
    if planned:
        assert found[0] == order["forward"]


@pytest.mark.thorough
@examples(10)
@given_any(steps().filter(lambda step: step.world_size == 4))
def test_stage_by_stage_gives_what_flat_collectives_give_in_any_step(step: Step):
    step = dataclasses.replace(step, hosts=2, hardware=FAST)
    for found, wanted in zip(step.run(*LOWERING), step.run(shard, bucket), strict=True):
        assert_close(found, wanted)


def test_the_planner_takes_stages_where_they_make_the_step_faster():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 60))
    rate, half = LinkRate(1e-6, 1e-7), LinkRate(1e-6, 5e-8)
    given = with_mesh_dims(hardware(memory_bytes_per_second=1e10), half, LinkRate(1e-6, 1e-9))
    given = dataclasses.replace(given, collectives=dict.fromkeys(given.collectives, rate))
    step, ctx = capture_step(model, torch.randn(16, 64), hardware=given, uses_p2p=True)
    flat = make_plan(step, ctx, default_passes())
    two = make_plan(step, ctx.replace(mesh_dims=two_dimensions(2, 4)), default_passes())
    assert not any(one.stage for order in flat.order.values() for one in order)
    assert any(one.stage for order in two.order.values() for one in order)
    assert flat.prediction is not None and two.prediction is not None
    assert two.prediction.step_seconds < 0.7 * flat.prediction.step_seconds
    assert Plan.from_dict(two.to_dict()) == two


def test_all_that_a_bucket_brought_is_taken_out_in_the_ranks_order():
    step = dataclasses.replace(MIXED, bucket_bytes=MANY)
    gm = step.lower(0, shard, bucket, hierarchical)
    taken = gm.graph.find_nodes(op="call_function", target=UNPACK)
    assert len(taken) > 2 and all(node.args[5] == 2 for node in taken)
