"""Exposure: why a collective is not hidden, in graphs worked out by hand."""

from __future__ import annotations

import pytest

from passes.graph.metadata import HELD_BACK
from passes.simulate.exposure import reasons
from passes.simulate.simulator import simulate
from passes.types.annotations import Reason
from tests.passes.simulate.test_simulator import Priced


def test_a_gather_that_starts_with_the_graph_has_nothing_to_hide_behind():
    b = Priced()
    start = b.gather(b.tensor("x"), seconds=10.0)
    graph = b.finish(b.kernel(b.wait(start), seconds=1.0)).graph
    assert reasons(simulate(graph)) == {start: Reason.NO_COMPUTE}


def test_where_the_network_is_never_idle_it_is_the_bottleneck():
    b = Priced()
    x = b.tensor("x")
    first = b.gather(x, seconds=10.0)
    second = b.gather(x, seconds=10.0)
    used = b.kernel(b.wait(first), seconds=2.0)
    graph = b.finish(b.kernel(used, b.wait(second), seconds=1.0)).graph
    found = reasons(simulate(graph))
    assert found == {first: Reason.NO_COMPUTE, second: Reason.NO_COMPUTE}


def test_a_reduction_waits_for_its_gradient():
    b = Priced()
    gradient = b.kernel(b.tensor("x"), seconds=9.0)
    start = b.reduce(gradient, seconds=4.0)
    graph = b.finish(b.wait(start)).graph
    assert reasons(simulate(graph)) == {start: Reason.DEPENDENCY}


@pytest.mark.parametrize("held", [Reason.MEMORY, Reason.IN_FLIGHT, None])
def test_what_was_ready_and_did_not_start_was_held_back(held):
    b = Priced()
    x = b.tensor("x")
    before = b.kernel(x, seconds=9.0)
    start = b.gather(x, seconds=4.0)
    if held is not None:
        HELD_BACK.set(start, held)
    graph = b.finish(b.kernel(before, b.wait(start), seconds=1.0)).graph
    assert reasons(simulate(graph)) == {start: held or Reason.ORDER}


def test_the_reason_is_that_of_the_longest_idle_time_before():
    b = Priced()
    x = b.tensor("x")
    before = b.kernel(x, seconds=9.0)
    first = b.gather(x, seconds=6.0)  # the network was idle for 9 seconds
    HELD_BACK.set(first, Reason.MEMORY)
    second = b.gather(x, seconds=6.0)  # follows at once
    used = b.kernel(before, b.wait(first), seconds=1.0)
    graph = b.finish(b.kernel(used, b.wait(second), seconds=1.0)).graph
    found = reasons(simulate(graph))
    assert found == {first: Reason.MEMORY, second: Reason.MEMORY}


def test_what_is_hidden_needs_no_reason():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=3.0)
    beside = b.kernel(x, seconds=4.0)
    graph = b.finish(b.kernel(beside, b.wait(start), seconds=1.0)).graph
    assert reasons(simulate(graph)) == {}
