"""Network: collectives in queues, worked out by hand."""

from __future__ import annotations

import pytest
from torch import fx

from passes.simulate.network import Network
from passes.simulate.simulator import simulate
from tests.passes.graphs import price
from tests.passes.simulate.test_simulator import Priced


@pytest.fixture
def nodes() -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(name) for name in "abc"]


def test_collectives_of_one_group_run_one_after_another(nodes):
    a, b, _ = nodes
    network = Network()
    network.start(a, "group", 3.0)
    network.compute(1.0)
    network.start(b, "group", 2.0)
    assert network.free_seconds("group") == 5.0
    assert network.wait(b) == 4.0
    assert network.starts == {a: 0.0, b: 3.0} and network.ends == {a: 3.0, b: 5.0}
    assert network.wait(a) == 0.0


def test_collectives_of_two_groups_run_beside_each_other(nodes):
    a, b, c = nodes
    network = Network()
    network.start(a, "one", 3.0)
    network.start(b, "other", 4.0)
    network.start(c, "one", 2.0)
    network.compute(1.0)
    assert (network.free_seconds("one"), network.free_seconds("other")) == (5.0, 4.0)
    assert network.wait(b) == 3.0
    assert network.drain() == 1.0
    assert network.ends == {a: 3.0, b: 4.0, c: 5.0}


def test_beside_computing_the_first_in_flight_comes_late_and_what_follows_does_not(nodes):
    a, b, _ = nodes
    network = Network()
    network.start(a, "group", 3.0, start_delay_seconds=2.0)
    network.start(b, "group", 1.0, start_delay_seconds=2.0)
    assert network.free_seconds("group") == 6.0
    network.compute(10.0)
    assert network.ends == {a: 5.0, b: 6.0}


def test_nothing_comes_late_that_is_waited_for(nodes):
    a, b, _ = nodes
    network = Network()
    network.start(a, "group", 3.0, start_delay_seconds=2.0)
    assert network.wait(a) == 3.0
    network.start(b, "group", 3.0, start_delay_seconds=2.0)
    network.compute(1.0)  # which are lost to it
    assert network.wait(b) == 3.0
    assert network.ends == {a: 3.0, b: 7.0}


def test_a_late_collective_stalls_the_step():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=4.0)
    beside = b.kernel(x, seconds=4.0)
    last = b.kernel(b.wait(start), beside, seconds=1.0)
    graph = b.finish(last).graph
    assert simulate(graph).step_seconds == 5.0
    price(start, 4.0, start_delay_seconds=3.0)
    found = simulate(graph)
    assert found.exposed[start] == 3.0 and found.step_seconds == 8.0


def test_a_late_rank_delays_the_first_in_flight_also_while_it_is_waited_for(nodes):
    a, b, _ = nodes
    network = Network()
    network.start(a, "group", 3.0, lateness_seconds=2.0)
    network.start(b, "group", 1.0, lateness_seconds=2.0)
    assert network.wait(b) == 6.0
    assert network.ends == {a: 5.0, b: 6.0}
