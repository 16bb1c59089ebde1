"""Network: collectives in queues, worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from passes.simulate.network import Network
from passes.simulate.simulator import simulate
from tests.passes.examples import examples
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
    """By a share of the time since ranks last waited for each other."""
    a, b, c = nodes
    network = Network(idle_seconds=3.0)
    network.compute(1.0)
    network.start(a, "group", 3.0, lateness=0.5)
    network.start(b, "group", 1.0, lateness=0.5)
    assert network.wait(b) == 6.0
    assert network.ends == {a: 6.0, b: 7.0}
    network.compute(2.0)
    network.start(c, "group", 1.0, lateness=0.5)
    assert network.wait(c) == 2.0
    assert network.idle_seconds == 0.0


def test_collectives_on_shared_links_take_as_many_times_as_long(nodes):
    a, b, _ = nodes
    network = Network()
    network.start(a, "ours", 3.0)
    network.start(b, "model", 2.0, beside=frozenset({"ours"}))
    assert network.wait(b) == 4.0  # half of the bandwidth each
    assert network.now == 4.0
    assert network.wait(a) == 1.0  # alone again
    assert network.ends == {b: 4.0, a: 5.0}


def test_what_ends_first_leaves_the_links_to_the_other(nodes):
    a, b, c = nodes
    network = Network()
    network.start(a, "ours", 1.0)
    network.start(c, "ours", 1.0)
    network.start(b, "model", 4.0, beside=frozenset({"ours"}))
    assert network.wait(b) == 6.0
    assert network.ends == {a: 2.0, c: 4.0, b: 6.0}
    assert network.starts[c] == 2.0


def test_three_groups_on_the_same_links_have_a_third_each(nodes):
    a, b, c = nodes
    network = Network()
    network.start(a, "one", 2.0)
    network.start(b, "other", 2.0)
    network.start(c, "model", 1.0, beside=frozenset({"one", "other"}))
    assert network.wait(c) == 3.0
    assert network.drain() == 1.0
    assert network.ends == {c: 3.0, a: 4.0, b: 4.0}


def test_groups_on_other_links_keep_their_rate_meanwhile(nodes):
    a, b, c = nodes
    network = Network()
    network.start(a, "same", 2.0)
    network.start(b, "other", 3.0)
    network.start(c, "model", 2.0, beside=frozenset({"same"}))
    assert network.wait(c) == 4.0
    assert network.ends[b] == 3.0 and network.ends[a] == pytest.approx(4.0)


def test_on_the_group_of_another_it_runs_after_it(nodes):
    a, b, c = nodes
    network = Network()
    network.start(a, "within", 2.0)
    network.start(b, "between", 5.0)
    network.start(c, "within", 1.0, beside=frozenset({"between"}))
    assert network.wait(c) == 4.0  # two of a's, then one of its own beside b
    assert network.ends == {a: 2.0, c: 4.0}
    assert network.drain() == 2.0


@examples(100)
@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 9),
)
def test_no_byte_of_shared_links_is_lost(one, other, own):
    """Whoever shares them with whom, the links are busy for the sum of all seconds."""
    network, graph = Network(), fx.Graph()
    for group, queue in (("one", one), ("other", other)):
        for seconds in queue:
            network.start(graph.placeholder("x"), group, float(seconds))
    node = graph.placeholder("x")
    network.start(node, "model", float(own), beside=frozenset({"one"}))
    network.wait(node)
    network.drain()
    assert max(network.ends.values()) == pytest.approx(max(sum(one) + own, sum(other)))
