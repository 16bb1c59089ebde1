"""Collectives: their cost on a group, along a mesh dimension, and in stages."""

from __future__ import annotations

import dataclasses

import pytest

from passes.annotate.collectives import (
    by_all_to_all,
    cost_on,
    costs_in_stages,
    stages_of,
    stages_seconds,
)
from passes.types.hardware import LinkRate
from passes.types.learned import Learned
from tests.passes.graphs import GROUP, context, hardware, two_dimensions, with_mesh_dims

#: Latencies and seconds for a byte: between hosts, and within a host.
OUTER, INNER = LinkRate(1e-3, 1e-6), LinkRate(1e-5, 1e-8)


def hosts(**changes):
    """Eight ranks on two hosts."""
    profile = with_mesh_dims(hardware(), OUTER, INNER)
    dims = two_dimensions(2, 8)
    return context(world_size=8, mesh_dims=dims, hardware=profile, **changes), *dims


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_reduce", 6 / 4)]
)
def test_a_collective_takes_its_latency_and_the_bytes_on_the_wire(kind, sent):
    ctx = context(world_size=4)
    found = cost_on(kind, 4000, ctx)
    assert found.seconds == pytest.approx(1e-6 + 4000 * sent * 1e-8)
    assert found.latency_seconds == 1e-6
    assert cost_on(kind, 4000, ctx, GROUP) == found


def test_a_collective_of_one_rank_costs_nothing_and_needs_no_rate():
    ctx = context(world_size=1, hardware=hardware(collectives={}))
    assert cost_on("all_gather", 4000, ctx).total_seconds == 0


def test_the_compute_stream_pays_the_start_and_the_bytes():
    rate = LinkRate(1e-6, 1e-8, start_seconds=5e-6, overhead_seconds_per_byte=1e-9)
    ctx = context(world_size=4, hardware=hardware(collectives={"all_gather": rate}))
    found = cost_on("all_gather", 4000, ctx)
    assert found.overhead_seconds == pytest.approx(5e-6 + 3000 * 1e-9)
    assert found.total_seconds == pytest.approx(found.seconds + found.overhead_seconds)


def test_a_mesh_dimension_has_its_own_ranks_and_rates():
    ctx, outer, inner = hosts()
    assert cost_on("all_gather", 800, ctx, outer).seconds == pytest.approx(1e-3 + 400 * 1e-6)
    assert cost_on("all_gather", 800, ctx, inner).seconds == pytest.approx(1e-5 + 600 * 1e-8)
    assert cost_on("all_gather", 800, ctx, inner.group_name) == cost_on(
        "all_gather", 800, ctx, inner
    )


@pytest.mark.parametrize("uses_p2p", [False, True])
def test_stages_send_the_whole_tensor_within_a_host_and_a_part_between_hosts(uses_p2p):
    ctx, outer, inner = hosts(uses_p2p=uses_p2p)
    scatter = "all_to_all" if uses_p2p else "reduce_scatter"
    assert stages_of("all_gather", 800, ctx) == [
        ("all_gather", outer, 200),
        ("all_gather", inner, 800),
    ]
    assert stages_of("reduce_scatter", 800, ctx) == [
        ("reduce_scatter", inner, 800),
        ("reduce_scatter", outer, 200),
    ]
    assert stages_of("all_reduce", 800, ctx) == [
        (scatter, inner, 800),
        ("all_reduce", outer, 200),
        ("all_gather", inner, 800),
    ]


def test_stages_run_one_after_the_other():
    ctx, *_ = hosts()
    costs = costs_in_stages("all_reduce", 800, ctx)
    assert len(costs) == 3
    assert stages_seconds("all_reduce", 800, ctx) == pytest.approx(sum(c.seconds for c in costs))


def test_a_reduce_scatter_is_an_all_to_all_if_that_and_its_sum_are_faster():
    ctx = context(world_size=4)
    assert not by_all_to_all(4000, GROUP, ctx)  # equal rates: the sum decides
    slow = dataclasses.replace(ctx.hardware.collectives["reduce_scatter"], seconds_per_byte=1e-7)
    rates = {**ctx.hardware.collectives, "reduce_scatter": slow}
    assert by_all_to_all(4000, GROUP, ctx.replace(hardware=hardware(collectives=rates)))
    assert by_all_to_all(4000, GROUP, ctx.replace(uses_p2p=True))


def test_learned_corrections_change_each_price_and_lateness_is_added():
    rate = LinkRate(1e-6, 1e-8, start_seconds=5e-6, overhead_seconds_per_byte=1e-9)
    learned = Learned(8, overhead_factor=2.0, network_factor=0.5, lateness=1e-3)
    before = context(world_size=4, hardware=hardware(collectives={"all_gather": rate}))
    after = before.replace(hardware=dataclasses.replace(before.hardware, in_force=learned))
    one, other = (cost_on("all_gather", 4000, ctx) for ctx in (before, after))
    assert other.seconds == pytest.approx(one.seconds / 2)
    assert other.latency_seconds == pytest.approx(one.latency_seconds / 2)
    assert other.overhead_seconds == pytest.approx(one.overhead_seconds * 2)
    assert other.start_seconds == pytest.approx(one.start_seconds * 2)
    assert (one.lateness, other.lateness) == (0.0, 1e-3)
