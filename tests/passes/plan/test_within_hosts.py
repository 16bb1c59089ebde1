"""Sharding within hosts: gathers stay in a host, gradients cross between hosts once, as parts."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from hypothesis import given as given_any
from hypothesis import strategies as st
from torch import nn

from passes.annotate.annotate_costs import annotate, cost_of
from passes.annotate.training_state import optimizer_temporary_bytes, state_bytes
from passes.candidates.choices import Choice, choices_of
from passes.graph.captured import Captured
from passes.graph.fx_utils import COLLECTIVES, group_of, is_collective
from passes.graph.metadata import COLLECTIVE
from passes.overlap.bucket_collectives import bucket
from passes.overlap.hierarchical_collectives import hierarchical
from passes.overlap.reorder_collectives import order_of
from passes.pipeline import default_passes
from passes.plan.planner import Infeasible, make_plan
from passes.plan.search import Search
from passes.pricing.evaluator import PlanEvaluator
from passes.shard.lower_markers import shard
from passes.types.context import Context, Parameter
from passes.types.decision import DECISIONS, Decision
from passes.types.hardware import Hardware, LinkRate
from passes.types.plan import Plan
from tests.chosen import more, thorough
from tests.passes.captures import capture_step
from tests.passes.examples import examples
from tests.passes.graphs import (
    GROUP,
    INNER,
    OUTER,
    context,
    hardware,
    parameter,
    two_dimensions,
    with_mesh_dims,
)
from tests.passes.steps import LOWERING, Step, Weight, assert_close, steps

HOST_KEEP, HOST_AGAIN = Decision.SHARD_HOST_KEEP, Decision.SHARD_HOST_REGATHER
KEEP, AGAIN, REPLICATE = Decision.SHARD_KEEP, Decision.SHARD_REGATHER, Decision.REPLICATE

MANY = 1 << 20
#: Between hosts and within one as between all ranks: what goes stage by stage is not faster.
EVEN = with_mesh_dims(hardware(), LinkRate(1e-6, 1e-8), LinkRate(1e-6, 1e-8))
#: Stages are always faster.
STAGED = with_mesh_dims(
    hardware(memory_bytes_per_second=1e12), LinkRate(1e-9, 1e-11), LinkRate(1e-9, 1e-11)
)
MIXED = Step(
    (
        Weight((12, 3), decision=HOST_AGAIN),
        Weight((5, 2), decision=HOST_KEEP, returned=True),
        Weight((7,), decision=REPLICATE),
        Weight((9, 2), decision=AGAIN),  # rows that no number of ranks divides
        Weight((6,), torch.float64, HOST_AGAIN),
        Weight((3, 7, 2), decision=HOST_AGAIN, transposed=True),
        Weight((13,), decision=KEEP, returned=True),
        Weight((16, 2), decision=AGAIN),
        Weight((8, 2), torch.bfloat16, HOST_KEEP),
        Weight((5,), decision=HOST_AGAIN, trained=False),
    ),
    world_size=4,
    hosts=2,
    hardware=EVEN,
    again=True,
)


def collectives(step: Step, *passes) -> list[tuple[str, str, str]]:
    """Kind, group and purpose of each on rank 0, in order."""
    return [
        (COLLECTIVES[node.target], group_of(node), COLLECTIVE.of(node).label)
        for node in step.lower(0, *passes).graph.nodes
        if is_collective(node)
    ]


def by_all_to_all(given: Hardware) -> Hardware:
    slow = {"reduce_scatter": LinkRate(1.0, 1.0)}
    dimensions = {name: {**rates, **slow} for name, rates in given.dimensions.items()}
    return dataclasses.replace(
        given, collectives={**given.collectives, **slow}, dimensions=dimensions
    )


@pytest.mark.parametrize(
    ("world_size", "hosts", "bucket_bytes", "changes"),
    [
        (4, 2, 0, {}),
        (6, 2, 100, {"uses_p2p": True}),
        *thorough((8, 2, 200, {"hardware": STAGED, "in_flight_bytes": 0})),
        *more(
            (6, 3, MANY, {}),
            (8, 4, MANY, {"uses_p2p": True, "hardware": STAGED}),
            (6, 3, 100, {"hardware": by_all_to_all(EVEN)}),
        ),
    ],
)
def test_lowered_it_gives_what_the_markers_mean(world_size, hosts, bucket_bytes, changes):
    step = dataclasses.replace(
        MIXED, world_size=world_size, hosts=hosts, bucket_bytes=bucket_bytes, **changes
    )
    wanted = step.run()
    for passes in ((shard,), LOWERING):
        for found, one in zip(step.run(*passes), wanted, strict=True):
            assert_close(found, one)


@pytest.mark.thorough
@examples(10)
@given_any(steps(hosts=2), st.sampled_from([EVEN, STAGED]))
def test_lowered_it_gives_what_the_markers_mean_in_any_step(step: Step, profile: Hardware):
    step = dataclasses.replace(step, hardware=profile)
    for found, wanted in zip(step.run(*LOWERING), step.run(), strict=True):
        assert_close(found, wanted)


def test_gathers_stay_within_the_host_and_gradients_cross_as_parts():
    weights = (Weight((8,), decision=HOST_AGAIN), Weight((8,), decision=AGAIN))
    step = dataclasses.replace(MIXED, weights=weights, uses_p2p=True, again=False)
    assert collectives(step, shard, bucket, hierarchical) == [
        ("all_gather", INNER, "gather w0"),
        ("all_gather", GROUP, "gather w1"),
        ("all_to_all", GROUP, "reduce w1"),
        ("all_to_all", INNER, "reduce w0"),
        ("all_reduce", OUTER, "reduce w0, stage 2"),
    ]


def test_each_collective_costs_what_its_dimension_takes_for_its_bytes():
    # 64 bytes on two hosts of two ranks: whole within a host, a half between hosts.
    given = with_mesh_dims(hardware(), LinkRate(1.0, 3.0), LinkRate(2.0, 5.0))
    weights = (Weight((16,), decision=HOST_KEEP),)
    step = dataclasses.replace(MIXED, weights=weights, hardware=given, uses_p2p=True)
    nodes = step.lower(0, shard, bucket, hierarchical, annotate).graph.nodes
    assert [cost_of(node).seconds for node in nodes if is_collective(node)] == [
        2.0 + 5.0 * 64 / 2,
        2.0 + 5.0 * 64 / 2,
        1.0 + 3.0 * 2 * 32 / 2,
    ]


def test_what_is_cut_otherwise_shares_no_bucket():
    weights = [Weight((8,), decision=one) for one in (*DECISIONS, *DECISIONS)]
    step = dataclasses.replace(MIXED, weights=tuple(weights), bucket_bytes=MANY, again=False)
    found = collectives(step, shard, bucket, hierarchical)
    assert sorted(found) == [
        ("all_gather", GROUP, "gather w1+w2+w6+w7"),
        ("all_gather", INNER, "gather w3+w4+w8+w9"),
        ("all_reduce", GROUP, "reduce w5+w0"),
        ("all_reduce", OUTER, "reduce w9+w8+w4+w3, stage 2"),
        ("reduce_scatter", GROUP, "reduce w7+w6+w2+w1"),
        ("reduce_scatter", INNER, "reduce w9+w8+w4+w3"),
    ]


def test_the_plans_order_is_followed():
    step = dataclasses.replace(MIXED, uses_p2p=True, deciding=True, bucket_bytes=100, again=False)
    order = order_of(step.lower(0, *LOWERING).graph)
    gm, ctx = step.build(1), step.context(1)
    ctx = ctx.replace(plan=ctx.plan.replace(order={"forward": order}), deciding=False)
    for one in LOWERING:
        gm = one(gm, ctx)
    assert order_of(gm.graph) == order and any(one.stage for one in order)


def on_mesh(parameters: list[Parameter], decision: Decision, hosts: int, each: int) -> Context:
    return context(
        parameters,
        decision,
        world_size=hosts * each,
        hardware=EVEN,
        mesh_dims=two_dimensions(hosts, hosts * each),
    )


@pytest.mark.parametrize(
    ("decision", "rows"), [(REPLICATE, 1000), (HOST_KEEP, 125), (HOST_AGAIN, 125), (AGAIN, 1)]
)
def test_state_of_1024_ranks_on_128_hosts(decision, rows):
    # 1000 rows of 3 numbers: 125 rows on each of 8 ranks, one on each of 1024.
    ctx = on_mesh([parameter("w", (1000, 3))], decision, hosts=128, each=8)
    part = rows * 3 * 4
    assert state_bytes(ctx, ctx.plan) == {
        "parameters": part,
        "gradients": part,
        "optimizer": 2 * part,
    }
    assert optimizer_temporary_bytes(ctx, ctx.plan) == 2 * part


def test_the_choices_and_their_prices():
    outer, inner = LinkRate(0.0, 3e-6), LinkRate(0.0, 1e-6)
    given = with_mesh_dims(hardware(update_seconds_per_byte=1e-12), outer, inner)
    flat = dict.fromkeys(given.collectives, LinkRate(0.0, 1.0))  # never
    given = dataclasses.replace(given, collectives=flat)
    weight = parameter("w", (1024, 4))
    full = 1024 * 4 * 4
    ctx = on_mesh([weight], REPLICATE, hosts=4, each=2).replace(hardware=given)
    found = {one.decision: one for one in choices_of(weight, ctx)}
    assert list(found) == [REPLICATE, HOST_KEEP, HOST_AGAIN, KEEP, AGAIN]
    # A half of it, and of what belongs to it, is on each rank of a host.
    state = 4 * full // 2
    assert [found[one].memory_bytes for one in (HOST_KEEP, HOST_AGAIN)] == [state + full, state]
    within, between = full / 2 * 1e-6, 2 * (full / 2) * 3 / 4 * 3e-6
    for one, gathers in ((HOST_KEEP, 0), (HOST_AGAIN, 1)):
        assert found[one].forward_seconds == pytest.approx(within)
        assert found[one].backward_seconds == pytest.approx(gathers * within + within + between)
        assert found[one].compute_seconds == pytest.approx(state * 1e-12)
    frozen = dataclasses.replace(weight, requires_grad=False, optimizer_bytes=0)
    (*_, kept) = [one for one in choices_of(frozen, ctx) if one.decision == HOST_KEEP]
    assert kept.backward_seconds == 0.0
    assert len(choices_of(weight, ctx.replace(mesh_dims=None))) == 3
    # Eight numbers are enough for two ranks, and for 1024 they are not.
    few = on_mesh([], REPLICATE, hosts=512, each=2).replace(hardware=given)
    assert [one.decision for one in choices_of(parameter("b", (8,)), few)] == [
        REPLICATE,
        HOST_KEEP,
        HOST_AGAIN,
    ]


def step_on_a_slow_network_between_hosts() -> tuple[Captured, Context]:
    """Two hosts of four ranks: within them all is a hundred times as fast."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(96, 96, bias=False), nn.GELU()]
    given = with_mesh_dims(hardware(), LinkRate(1e-6, 1e-7), LinkRate(1e-6, 1e-9))
    flat = dict.fromkeys(given.collectives, LinkRate(1e-6, 4e-7))  # four share what a host sends
    return capture_step(
        nn.Sequential(*layers),
        torch.randn(16, 96),
        world_size=8,
        hardware=dataclasses.replace(given, collectives=flat),
        uses_p2p=True,
        mesh_dims=two_dimensions(2, 8),
    )


def planned(step: Captured, ctx: Context, limit_bytes: int | None) -> Plan:
    return make_plan(step, ctx.replace(limit_bytes=limit_bytes), default_passes())


def test_a_search_for_little_memory_starts_from_what_takes_least():
    step, ctx = step_on_a_slow_network_between_hosts()
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=0), default_passes())
    Search(evaluator).least()
    recomputing = [key for key in evaluator.seen if key.recompute]
    assert recomputing and set(recomputing[0].decisions) == {AGAIN}


@pytest.mark.thorough
def test_the_planner_shards_within_hosts_where_memory_is_short_and_only_the_outside_is_slow():
    step, ctx = step_on_a_slow_network_between_hosts()
    ctx = ctx.replace(slices=())  # whole: the least limit of slices is far below what is asked here
    with pytest.raises(Infeasible) as infeasible:
        planned(step, ctx, 1)
    limit = round(1.3 * infeasible.value.least_bytes)
    found = planned(step, ctx, limit)
    assert any(row.decision.within_host for row in found.parameters)
    assert found.ranks_of_a_host == 4 and found.prediction.peak_bytes <= limit
    whole = 4 * 96 * 96 * 4
    for row in found.parameters:
        ranks = 4 if row.decision.within_host else 8
        assert row.saved_bytes == (whole - whole // ranks if row.decision.sharded else 0)

    def over_all_ranks(one: Parameter, given: Context) -> list[Choice]:
        return [c for c in choices_of(one, given) if not c.decision.within_host]

    with mock.patch("passes.pricing.evaluator.choices_of", over_all_ranks):
        without = planned(step, ctx, limit)
    assert found.prediction.step_seconds < 0.95 * without.prediction.step_seconds
