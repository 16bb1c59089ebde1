"""What measured steps teach: the corrections behind made-up measurements are found again."""

from __future__ import annotations

import dataclasses

import pytest
from torch import fx

from osdp_compile.calibration import evidence
from osdp_compile.calibration.evidence import (
    MeasuredGraph,
    MeasuredStep,
    is_systematic,
    learned_from,
    middle_half,
    typical,
)
from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import WAIT, is_collective
from passes.graph.metadata import COST
from passes.simulate.simulator import simulate
from passes.simulate.skeleton import skeleton_of
from passes.types.annotations import Cost
from passes.types.learned import LEAST_FACTOR, Learned
from tests.passes.graphs import price
from tests.passes.simulate.test_simulator import Priced

UPDATE_SECONDS = 0.5


def skeleton(layers: int = 4, prefetches: bool = False) -> fx.Graph:
    """Layers of a kernel and a fused kernel, each with a gather that it waits for.

    ``prefetches``: the next layer's gather is always in flight.
    """
    b = Priced()
    x = b.tensor("x")
    starts = []

    def start() -> None:
        starts.append(b.gather(x))
        COST.set(starts[-1], Cost(seconds=2.0, compute_overhead_seconds=0.25))

    start()
    for _ in range(layers):
        if prefetches:
            start()
        x = b.kernel(x, seconds=1.0)
        if not prefetches:
            b.wait(starts[-1])
        x = price(b.pointwise(x), 0.5)
        x = b.kernel(x, seconds=0.5)
        if prefetches:
            b.wait(starts[-2])
        else:
            start()
    b.wait(starts[-1])
    return skeleton_of(b.finish(x).graph)


def measured(graph: fx.Graph, truth: Learned, idle_seconds: float = 0.0) -> MeasuredGraph:
    """The times of a step for which these corrections are right.

    ``idle_seconds``: before, the time since a collective ended.
    """
    called = [node for node in graph.nodes if node.op == "call_function"]
    costs = {node: cost_of(node) for node in called}
    for node, cost in costs.items():
        COST.set(node, evidence._corrected(node, cost, Learned(), truth))
    found = simulate(graph, idle_seconds=idle_seconds)
    exposed = {**found.exposed, **found.of_model}
    seconds = []
    for node in called:
        cost = cost_of(node)
        if is_collective(node):
            seconds.append(cost.compute_overhead_seconds)
        else:
            waited = node.args[0] if node.target is WAIT else node
            seconds.append(exposed.get(waited, cost.seconds))
    for node, cost in costs.items():
        COST.set(node, cost)
    return MeasuredGraph(graph, tuple(seconds))


def step_of(truth: Learned, prefetches: bool = False) -> MeasuredStep:
    forward = measured(skeleton(4, prefetches), truth)
    backward = measured(skeleton(8, prefetches), truth)
    update_seconds = UPDATE_SECONDS * truth.update_factor
    return MeasuredStep(8, forward, backward, update_seconds, truth.loop_seconds)


def values(learned: Learned) -> tuple[float, ...]:
    return dataclasses.astuple(learned)


@pytest.mark.parametrize(
    "truth",
    [
        Learned(8),
        Learned(8, kernel_factor=1.5, fused_factor=3.0, overhead_factor=2.0),
        Learned(8, lateness=0.25),
        Learned(8, kernel_factor=0.5, network_factor=0.6, update_factor=2.0, loop_seconds=0.25),
    ],
)
def test_the_corrections_behind_a_step_are_found(truth):
    found = learned_from(step_of(truth), UPDATE_SECONDS, Learned())
    assert values(found) == pytest.approx(values(truth), rel=1e-6)


def test_a_models_own_collectives_correct_the_network_and_no_kernel():
    """They take twice as long as the rates say, and so do ours."""
    b = Priced()
    x = b.tensor("x")
    for _ in range(4):
        x = b.of_model(b.kernel(x, seconds=1.0), seconds=2.0)
        x = price(b.pointwise(x), 0.5)
        x = b.kernel(x, b.wait(b.gather(x, seconds=1.0)), seconds=0.5)
    graph = skeleton_of(b.finish(x).graph)
    truth = Learned(8, kernel_factor=1.5, network_factor=2.0)
    one = measured(graph, truth)
    assert one.wait_seconds == 4 * 2.0 * (2.0 + 1.0)
    step = MeasuredStep(8, one, one, UPDATE_SECONDS, 0.0)
    found = learned_from(step, UPDATE_SECONDS, Learned())
    assert found.kernel_factor == pytest.approx(1.5) and found.fused_factor == pytest.approx(1.0)
    # Longer waits are the lateness of ranks, as far as it goes; each collective is alone here.
    assert found.lateness == evidence.MOST_LATE and found.network_factor > 1.0
    assert evidence._Waits(step, Learned()).predicted(found) == pytest.approx(step.wait_seconds)


def test_where_something_is_always_in_flight_one_factor_explains_all_computing():
    truth = Learned(8, kernel_factor=2.0, fused_factor=2.0)
    found = learned_from(step_of(truth, prefetches=True), UPDATE_SECONDS, Learned())
    assert found.kernel_factor == found.fused_factor == pytest.approx(2.0)
    assert found.overhead_factor == 1.0


def test_corrections_of_a_corrected_profile_are_found_too():
    before = Learned(8, 2.0, 0.5, 1.5, 0.5, 0.25, 2.0, 0.25)
    truth = Learned(8, 1.5, 3.0, 1.0, 1.0, 0.375, 1.0, 0.5)
    step = step_of(truth)
    for graph in step.graphs:
        for node, _ in graph.pairs():
            COST.set(node, evidence._corrected(node, cost_of(node), Learned(), before))
    predicted = UPDATE_SECONDS * before.update_factor + before.loop_seconds
    found = learned_from(step, predicted, before)
    assert values(found) == pytest.approx(values(truth), rel=1e-6)


def test_computing_without_any_prediction_or_time_stays_within_bounds():
    step = step_of(Learned())
    still = [
        MeasuredGraph(graph.skeleton, tuple(0.0 for _ in graph.node_seconds))
        for graph in step.graphs
    ]
    found = learned_from(MeasuredStep(8, still[0], still[1], 0.0, 0.0), 0.0, Learned())
    assert (found.kernel_factor, found.fused_factor) == (LEAST_FACTOR, LEAST_FACTOR)
    assert (found.update_factor, found.loop_seconds) == (1.0, 0.0)


def test_a_small_difference_teaches_nothing():
    assert not is_systematic(step_of(Learned()), UPDATE_SECONDS)
    assert not is_systematic(step_of(Learned(kernel_factor=1.02)), UPDATE_SECONDS)
    assert is_systematic(step_of(Learned(kernel_factor=1.3)), UPDATE_SECONDS)
    assert is_systematic(step_of(Learned()), UPDATE_SECONDS + 10.0)


def test_errors_that_cancel_in_the_step_are_seen():
    right = step_of(Learned())
    longer = dataclasses.replace(right, loop_seconds=right.loop_seconds + 5.0)
    waits = sum(graph.wait_seconds for graph in right.graphs)
    assert waits > 5.0
    shorter = dataclasses.replace(
        longer,
        backward=MeasuredGraph(
            right.backward.skeleton,
            tuple(
                seconds * (1 - 5.0 / right.backward.wait_seconds)
                if node.target is WAIT
                else seconds
                for node, seconds in right.backward.pairs()
            ),
        ),
    )
    assert shorter.step_seconds == pytest.approx(right.step_seconds)
    assert is_systematic(shorter, UPDATE_SECONDS)


def test_outliers_do_not_count():
    steps = [
        dataclasses.replace(step_of(Learned()), steps=1, loop_seconds=seconds)
        for seconds in (1.0, 1.2, 90.0, 0.001, 1.1, 0.9, 50.0, 0.002)
    ]
    assert {one.loop_seconds for one in middle_half(steps)} == {0.9, 1.0, 1.1, 1.2}
    found = typical(steps)
    assert (found.steps, found.loop_seconds) == (8, pytest.approx(1.05))
    assert found.forward.node_seconds == pytest.approx(steps[0].forward.node_seconds)
