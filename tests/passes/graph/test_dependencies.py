"""Dependencies: the graph itself, and the hand-written walks of loops that are hot, held to it."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from torch import fx

from passes.annotate.annotate_costs import annotate
from passes.graph.dataflow import Dataflow
from passes.graph.dependencies import dependency_graph
from passes.graph.fx_utils import positions
from passes.graph.metadata import COLLECTIVE
from passes.ops.markers import REDUCE_GRAD
from passes.overlap import bucket_collectives, hoist_gradients, reorder_collectives
from passes.shard.lower_markers import shard
from passes.simulate.memory import MemoryModel
from tests.passes.steps import SEVERAL, Step


@pytest.fixture(scope="module")
def marked() -> fx.Graph:
    return Step(SEVERAL, again=True).build(0).graph


@pytest.fixture(scope="module")
def lowered() -> fx.GraphModule:
    return Step(SEVERAL, again=True).lower(0, shard, annotate)


def starts(gm: fx.GraphModule) -> list[fx.Node]:
    found = [node for node in gm.graph.nodes if COLLECTIVE.is_set(node)]
    assert len(found) > 8
    return found


def test_every_input_is_an_edge_and_graph_order_is_a_topological_one(lowered):
    found = dependency_graph(lowered.graph)
    order = positions(lowered.graph)
    assert [*found] == [*lowered.graph.nodes]
    assert all(order[source] < order[user] for source, user in found.edges)
    assert {user: list(found.predecessors(user)) for user in found} == {
        node: node.all_input_nodes for node in lowered.graph.nodes
    }


def test_hoist_moves_what_only_the_gradient_needs(marked):
    found = dependency_graph(marked)
    markers = marked.find_nodes(op="call_function", target=REDUCE_GRAD)
    assert len(markers) == len(SEVERAL)
    for marker in markers:
        apart = nx.restricted_view(found, [marker], [])
        needs = {one for one in nx.ancestors(found, marker) if hoist_gradients._movable(one)}
        only = {one for one in needs if nx.descendants(apart, one) <= needs}
        assert set(hoist_gradients._needed_for(marker)) == {marker, *only}
        assert only


def test_a_gather_is_prepared_by_the_operators_before_it(lowered):
    found = dependency_graph(lowered.graph)
    order = positions(lowered.graph)
    prepared = 0
    for start in starts(lowered):
        before = [n for n in nx.ancestors(found, start) if n.op == "call_function"]
        assert reorder_collectives._preparation(start, order) == sorted(before)
        prepared += COLLECTIVE.of(start).gathers and bool(before)
    assert prepared


def test_users_before_a_bucket_are_what_depends_on_a_member(lowered):
    found = dependency_graph(lowered.graph)
    several = 0
    for start, anchor in itertools.pairwise(starts(lowered)):
        (wait,) = start.users
        users = [n for n in nx.descendants(found, wait) if n.op == "call_function" and n < anchor]
        assert bucket_collectives._users_before(wait, anchor) == sorted(users)
        several += len(users) > 1
    assert several


def test_memory_asks_what_a_result_depends_on(lowered):
    found = dependency_graph(lowered.graph)
    dataflow = Dataflow(lowered.graph)
    model = MemoryModel(dataflow)
    places = range(0, len(dataflow.nodes), 3)
    answers = set()
    for index, other in itertools.product(places, places):
        one, needed = dataflow.nodes[index], dataflow.nodes[other]
        depends = one is needed or nx.has_path(found, needed, one)
        assert model._needs(index, other) == depends
        answers.add(depends)
    assert answers == {True, False}
