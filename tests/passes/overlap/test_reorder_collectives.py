"""Reorder: early starts, late waits, the memory limit, and one order for all ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from passes.annotate.annotate_costs import annotate
from passes.graph.fx_utils import WAIT, is_collective, positions
from passes.graph.metadata import COLLECTIVE, HELD_BACK
from passes.overlap.bucket_collectives import bucket
from passes.overlap.list_scheduler import Headroom
from passes.overlap.reorder_collectives import reorder
from passes.shard.lower_markers import shard
from passes.simulate.simulator import simulate
from passes.types.annotations import Reason
from passes.types.decision import Decision
from tests.passes.examples import examples
from tests.passes.graphs import hardware
from tests.passes.steps import LOWERING, Step, Weight, assert_same_bits, steps

aten = torch.ops.aten

MIXED = Step(
    (
        Weight((12, 3)),
        Weight((5, 2), decision=Decision.SHARD_KEEP, returned=True),
        Weight((7,), decision=Decision.REPLICATE),
        Weight((6,), torch.float64),
        Weight((3, 7, 2), transposed=True),
        Weight((4, 4)),
    ),
    bucket_bytes=64,
)

# The same with every weight gathered again for its gradient: gathers among reductions.
AGAIN = dataclasses.replace(MIXED, bucket_bytes=0, again=True)

# Four equal sharded weights: a gather costs about as much as the compute between two uses.
EQUAL = Step((Weight((64, 4)),) * 4, batch_rows=(64, 64))
# So much compute that the network could do everything beside the first kernels.
LONG_KERNELS = dataclasses.replace(EQUAL, batch_rows=(512, 512))


def labels(gm: fx.GraphModule) -> list[str]:
    return [COLLECTIVE.of(n).label for n in gm.graph.nodes if is_collective(n)]


def find(gm: fx.GraphModule, label: str) -> tuple[fx.Node, fx.Node]:
    """A collective's start and wait, by what it is for."""
    for node in gm.graph.nodes:
        if is_collective(node) and COLLECTIVE.of(node).label == label:
            (wait,) = node.users
            return node, wait
    raise KeyError(label)


def kernels_between(gm: fx.GraphModule, first: fx.Node, last: fx.Node) -> int:
    """Matrix products that run while a collective is in flight."""
    order = positions(gm.graph)
    products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    return sum(order[first] < order[node] < order[last] for node in products)


def most_gathers_in_flight(gm: fx.GraphModule) -> int:
    flying = most = 0
    for node in gm.graph.nodes:
        if is_collective(node) and COLLECTIVE.of(node).gathers:
            flying += 1
            most = max(most, flying)
        elif node.target is WAIT and COLLECTIVE.of(node.args[0]).gathers:  # type: ignore[union-attr]
            flying -= 1
    return most


@pytest.mark.parametrize(
    ("world_size", "in_flight_bytes", "uses_p2p"),
    [(2, None, False), (3, 100, False), (4, 0, False), (2, 0, True), (3, None, True)],
)
def test_the_order_changes_no_bit(world_size: int, in_flight_bytes: int | None, uses_p2p: bool):
    step = dataclasses.replace(
        MIXED, world_size=world_size, in_flight_bytes=in_flight_bytes, uses_p2p=uses_p2p
    )
    for found, wanted in zip(step.run(*LOWERING), step.run(shard, bucket), strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.thorough
@examples(14)
@given(steps())
def test_the_order_changes_no_bit_of_any_step(step: Step):
    for found, wanted in zip(step.run(*LOWERING), step.run(shard, bucket), strict=True):
        assert_same_bits(found, wanted)


def test_the_nodes_are_the_same_ones():
    ctx = MIXED.context(0)
    gm = annotate(bucket(shard(MIXED.build(0), ctx), ctx), ctx)
    before = list(gm.graph.nodes)
    after = list(reorder(gm, ctx).graph.nodes)
    assert set(after) == set(before)
    assert len(after) == len(before)
    assert after != before


def test_gathers_after_the_first_run_beside_compute():
    gm = EQUAL.lower(0, *LOWERING)
    assert all(kernels_between(gm, *find(gm, f"gather w{i}")) > 0 for i in (1, 2, 3))


def test_reductions_run_beside_the_backward_that_goes_on():
    # The last gradient, w0's, is made just before the end.
    gm = EQUAL.lower(0, *LOWERING)
    assert all(kernels_between(gm, *find(gm, f"reduce w{i}")) > 0 for i in (1, 2, 3))


def test_a_gather_is_waited_for_right_before_its_first_use():
    gm = EQUAL.lower(0, *LOWERING)
    for index in range(4):
        _, wait = find(gm, f"gather w{index}")
        node = wait.next
        while is_collective(node):  # the next one may start in between
            node = node.next
        assert node in wait.users


def test_less_communication_is_exposed_than_on_the_spot():
    on_the_spot = EQUAL.lower(0, shard, annotate)
    scheduled = EQUAL.lower(0, shard, annotate, reorder)
    before, after = simulate(on_the_spot.graph), simulate(scheduled.graph)
    assert after.compute_seconds == pytest.approx(before.compute_seconds)
    assert after.exposed_seconds < 0.5 * before.exposed_seconds


@examples(14)
@given(steps())
def test_the_step_is_never_slower_than_without_overlap(step: Step):
    # All there is to run, compute and then network, is the slowest a schedule without idle
    # streams could be.
    gm = step.lower(0, shard, bucket, annotate)
    before = simulate(gm.graph).step_seconds
    gm = step.lower(0, *LOWERING)
    assert simulate(gm.graph).step_seconds <= before * (1 + 1e-9)


def test_without_a_limit_gathers_run_ahead():
    gm = LONG_KERNELS.lower(0, *LOWERING)
    assert most_gathers_in_flight(gm) == 3


def test_in_flight_bytes_bounds_how_far_gathers_run_ahead():
    # A whole weight takes 1024 bytes: room for two.
    step = dataclasses.replace(LONG_KERNELS, in_flight_bytes=2048)
    gm = step.lower(0, *LOWERING)
    assert most_gathers_in_flight(gm) == 2


def test_nothing_runs_ahead_with_no_bytes_in_flight():
    step = dataclasses.replace(LONG_KERNELS, in_flight_bytes=0)
    gm = step.lower(0, *LOWERING)
    assert most_gathers_in_flight(gm) == 1


def peak_and_seconds(step: Step) -> tuple[int, float]:
    gm = step.lower(0, *LOWERING)
    simulation = simulate(gm.graph)
    return simulation.peak_bytes, simulation.step_seconds


def test_overlap_is_given_up_before_memory():
    step = dataclasses.replace(EQUAL, batch_rows=(1, 1))
    free_peak, free_seconds = peak_and_seconds(step)
    least_peak, most_seconds = peak_and_seconds(dataclasses.replace(step, in_flight_bytes=0))
    assert least_peak < free_peak
    assert free_seconds < most_seconds
    slowest_yet = free_seconds
    for limit in range(free_peak, least_peak - 1, -(free_peak - least_peak) // 6):
        peak, seconds = peak_and_seconds(dataclasses.replace(step, limit_bytes=limit))
        assert peak <= limit
        assert seconds >= slowest_yet - 1e-12
        slowest_yet = seconds


def test_overlap_is_given_up_only_where_memory_is_short():
    # On the spot the limit is just kept, so at the peak there is no room for anything else.
    on_the_spot = EQUAL.lower(0, shard, annotate)
    limit = simulate(on_the_spot.graph).peak_bytes
    gm = dataclasses.replace(EQUAL, limit_bytes=limit, deciding=True).lower(0, *LOWERING)
    assert simulate(gm.graph).peak_bytes <= limit
    beside = [
        kernels_between(gm, *find(gm, f"{what} w{i}"))
        for what in ("gather", "reduce")
        for i in range(4)
    ]
    assert sum(count > 0 for count in beside) >= 4


@examples(14)
@given(steps(), st.floats(0, 1))
def test_any_limit_that_the_order_on_the_spot_keeps_is_kept(step: Step, share: float):
    step = dataclasses.replace(step, deciding=True, in_flight_bytes=None)
    before = simulate(step.lower(0, shard, bucket, annotate).graph)
    free_bytes = simulate(step.lower(0, *LOWERING).graph).peak_bytes
    limit = before.peak_bytes + round(share * max(0, free_bytes - before.peak_bytes))
    found = simulate(dataclasses.replace(step, limit_bytes=limit).lower(0, *LOWERING).graph)
    assert found.peak_bytes <= limit
    assert found.step_seconds <= before.step_seconds * (1 + 1e-9)


def why_held(step: Step) -> set[Reason]:
    """Why collectives started no earlier, of those that were ready before."""
    found = {
        HELD_BACK.of(node) for node in step.lower(0, *LOWERING).graph.nodes if is_collective(node)
    }
    return found - {Reason.ORDER}


@pytest.mark.parametrize("deciding", [True, False])
def test_a_collective_says_what_held_it_back(deciding: bool):
    step = dataclasses.replace(LONG_KERNELS, deciding=deciding)
    plenty, on_the_spot = 1 << 30, simulate(EQUAL.lower(0, shard, annotate).graph).peak_bytes
    tight = dataclasses.replace(EQUAL, deciding=deciding, limit_bytes=on_the_spot)
    assert why_held(step) == set()
    assert why_held(dataclasses.replace(step, limit_bytes=plenty)) == set()
    assert why_held(tight) == {Reason.MEMORY}
    for limit in (None, plenty):
        for in_flight_bytes in (0, 2048):
            bound = dataclasses.replace(step, in_flight_bytes=in_flight_bytes, limit_bytes=limit)
            assert why_held(bound) == {Reason.IN_FLIGHT}
    # Where nothing fits, nothing is in flight: that is for the limit, whatever the plan allows.
    assert why_held(dataclasses.replace(step, in_flight_bytes=2048, limit_bytes=1)) == {
        Reason.MEMORY
    }


def test_room_is_what_is_left_at_each_node():
    headroom = Headroom([5, 3, 9, 4])
    assert (headroom.least(0, 2), headroom.least(2, 4), headroom.at(1)) == (3, 4, 3)
    headroom.take(2, 1, 3)
    assert [headroom.at(place) for place in range(4)] == [5, 1, 7, 4]
    assert headroom.least(2, 2) > 1 << 60  # used at once: it takes no more than on the spot


def test_the_limit_is_of_everything_the_rank_holds():
    # What the graph does not allocate leaves less for overlap.
    step = dataclasses.replace(EQUAL, batch_rows=(1, 1))
    free_peak, _ = peak_and_seconds(step)
    base = 10_000
    ctx = step.context(0).replace(base_bytes=base, limit_bytes=base + free_peak - 1)
    gm = reorder(annotate(shard(step.build(0), ctx), ctx), ctx)
    assert simulate(gm.graph).peak_bytes < free_peak


def test_a_limit_that_cannot_be_met_gives_the_order_with_the_least_peak():
    for step in (dataclasses.replace(EQUAL, batch_rows=(1, 1)), MIXED, AGAIN):
        step = dataclasses.replace(step, deciding=True)  # an order that is given costs memory
        peaks = [
            peak_and_seconds(dataclasses.replace(step, in_flight_bytes=cap))[0] for cap in (None, 0)
        ]
        found, _ = peak_and_seconds(dataclasses.replace(step, limit_bytes=1))
        assert found <= min(peaks)
        # Which is then the least limit that can be met.
        again, _ = peak_and_seconds(dataclasses.replace(step, limit_bytes=found))
        assert again == found


def test_a_graph_without_collectives_is_left_alone():
    step = Step((Weight((4,), decision=Decision.REPLICATE, trained=False),))
    before = step.lower(0, shard, annotate)
    after = step.lower(0, shard, annotate, reorder)
    assert [str(n) for n in after.graph.nodes] == [str(n) for n in before.graph.nodes]


def test_the_same_graph_gives_the_same_order_twice():
    first, second = MIXED.lower(0, *LOWERING), MIXED.lower(0, *LOWERING)
    assert [str(n) for n in first.graph.nodes] == [str(n) for n in second.graph.nodes]


@pytest.mark.parametrize(
    "step",
    [pytest.param(MIXED, id="once"), pytest.param(AGAIN, id="again")],
)
@pytest.mark.parametrize("in_flight_bytes", [None, 200, 0])
def test_ranks_with_other_batches_start_the_same_collectives_in_the_same_order(
    in_flight_bytes: int | None, step: Step
):
    # Ranks differ a thousandfold in compute, so that each would like another schedule.
    step = dataclasses.replace(
        step, world_size=4, batch_rows=(1, 900, 40, 2), in_flight_bytes=in_flight_bytes
    )
    first, *others = [labels(gm) for gm in step.lowered(*LOWERING)]
    for other in others:
        assert other == first


def test_ranks_whose_hardware_is_faster_keep_the_order_too():
    fast = hardware(flops_per_second={"default": 1e12}, memory_bytes_per_second=1e12)
    quick = dataclasses.replace(MIXED, hardware=fast)
    assert labels(quick.lower(0, *LOWERING)) == labels(MIXED.lower(0, *LOWERING))
