"""Skeletons: small, and simulated to the time of their graphs."""

from __future__ import annotations

import pytest

from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import ALL_GATHER, WAIT
from passes.graph.metadata import COST
from passes.simulate.simulator import simulate
from passes.simulate.skeleton import fused, is_computing, kernels, skeleton_of, stalls
from passes.types.annotations import Cost
from tests.passes.graphs import GROUP, price
from tests.passes.simulate.test_simulator import Priced


def step() -> Priced:
    b = Priced()
    x = b.tensor("x")
    first = b.kernel(x, seconds=1.0)
    start = b.gather(b.pointwise(first), seconds=6.0)
    overhead, delay, lateness = 0.5, 0.25, 2.0
    COST.set(start, Cost(0, 0, 0, 0, 6.0, overhead, delay, lateness))
    beside = b.kernel(b.kernel(x, seconds=1.0), seconds=2.0)
    pointwise = price(b.pointwise(beside), 0.5)
    other = b.gather(x, seconds=3.0, group="another")
    b.finish(b.kernel(b.wait(start), pointwise, seconds=1.0), b.wait(other))
    return b


def test_it_has_the_collectives_the_waits_and_the_computing_between():
    called = [node for node in skeleton_of(step().graph).nodes if node.op == "call_function"]
    computing = [kernels, fused]
    assert [node.target for node in called] == [
        *computing,
        ALL_GATHER,
        *computing,
        ALL_GATHER,
        *computing,
        WAIT,
        *computing,
        WAIT,
        *computing,
    ]
    seconds = [cost_of(node).seconds for node in called if is_computing(node)]
    assert seconds == [1.0, 0.0, 3.0, 0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_its_simulation_is_that_of_the_graph():
    graph = step().graph
    whole, small = simulate(graph), simulate(skeleton_of(graph))
    assert small.step_seconds == pytest.approx(whole.step_seconds)
    assert small.exposed_seconds == pytest.approx(whole.exposed_seconds)
    assert list(small.exposed.values()) == pytest.approx(list(whole.exposed.values()))


def test_a_models_own_collective_is_a_point_of_its_own():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=3.0)
    reduced = b.of_model(b.kernel(x, seconds=1.0), seconds=4.0, beside=[GROUP])
    graph = b.finish(b.kernel(b.wait(start), reduced, seconds=1.0)).graph
    small = skeleton_of(graph)
    (own,) = [node for node in small.nodes if stalls(node) and node.target is not WAIT]
    assert cost_of(own).beside == {GROUP}
    whole, found = simulate(graph), simulate(small)
    assert found.step_seconds == whole.step_seconds == 8.0
    assert found.of_model == {own: 6.0}
