"""Fusion regions: nodes that run as one kernel, and tensors in memory."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from passes.annotate.fusion_regions import NO_REGION, materialized, regions
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import ALL_REDUCE, WAIT
from passes.graph.op_traits import effective_users
from passes.ops.markers import UNSHARD
from tests.passes.graphs import GROUP, GraphBuilder

aten = torch.ops.aten


class Model(GraphBuilder):
    """Nodes of a few kinds, all on 4 by 4 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.input("x", [4, 4])

    def sin(self, source: fx.Node) -> fx.Node:
        return self.call(aten.sin.default, source)

    def add(self, first: fx.Node, second: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, first, second)

    def mm(self, first: fx.Node, second: fx.Node | None = None) -> fx.Node:
        return self.call(aten.mm.default, first, second or self.x)

    def analysed(self, *outputs: fx.Node) -> tuple[dict[fx.Node, int], set[fx.Node]]:
        graph = self.finish(*outputs).graph
        dataflow = Dataflow(graph)
        region = regions(dataflow)
        real = materialized(dataflow, region)
        return (
            {n: r for n, r in zip(dataflow.nodes, region, strict=True) if r != NO_REGION},
            {n for n, there in zip(dataflow.nodes, real, strict=True) if there},
        )


def test_a_chain_of_pointwise_operators_is_one_kernel_that_writes_its_end():
    m = Model()
    a = m.sin(m.x)
    b = m.sin(a)
    c = m.sin(b)
    region, real = m.analysed(c)
    assert region == {a: 0, b: 0, c: 0}
    assert real == {m.x, c}


def test_a_reduction_runs_with_what_it_reduces():
    m = Model()
    a = m.sin(m.x)
    total = m.call(aten.sum.dim_IntList, a, [0])
    region, real = m.analysed(total)
    assert region[a] == region[total]
    assert a not in real


def test_a_matrix_product_is_a_kernel_of_its_own_whose_inputs_exist():
    m = Model()
    a = m.sin(m.x)
    product = m.mm(a)
    b = m.sin(product)
    region, real = m.analysed(b)
    assert product not in region
    assert region[a] != region[b]
    assert real == {m.x, a, product, b}


def test_a_path_through_a_product_keeps_two_operators_apart_though_they_are_linked():
    m = Model()
    a = m.sin(m.x)
    last = m.add(a, m.mm(a))
    region, real = m.analysed(last)
    assert region[a] != region[last]
    assert a in real


def test_an_operator_is_computed_inside_its_one_consumer_behind_a_barrier():
    # a depends on no product and its only reader comes after one: Inductor inlines it there.
    m = Model()
    a = m.sin(m.x)
    last = m.add(a, m.mm(m.x))
    region, real = m.analysed(last)
    assert region[a] == region[last]
    assert a not in real


@pytest.mark.parametrize(
    ("target", "written"), [(aten.sin.default, False), (aten.exp.default, True)]
)
def test_an_operator_with_consumers_at_two_depths_runs_with_the_earlier(target, written):
    """It is written if it is dear to compute again in the later one."""
    m = Model()
    a = m.call(target, m.x)
    early = m.sin(a)
    late = m.add(a, m.mm(early))
    region, real = m.analysed(late)
    assert region[a] == region[early] != region[late]
    assert (a in real) == written


def test_siblings_that_share_only_an_input_from_outside_are_separate_kernels():
    m = Model()
    a, b = m.sin(m.x), m.sin(m.x)
    region, _ = m.analysed(a, b)
    assert region[a] != region[b]


def test_what_is_returned_is_written_even_inside_a_kernel():
    m = Model()
    a = m.sin(m.x)
    b = m.sin(a)
    region, real = m.analysed(b, a)
    assert region[a] == region[b]
    assert {a, b} <= real


def test_a_returned_view_makes_its_base_exist():
    m = Model()
    a = m.sin(m.x)
    b = m.sin(a)
    view = m.call(aten.t.default, a)
    _, real = m.analysed(b, view)
    assert a in real
    assert view not in real


def test_a_collective_is_a_barrier_and_a_wait_is_not():
    m = Model()
    a = m.sin(m.x)
    start = m.call(ALL_REDUCE, a, "sum", GROUP)
    wait = m.call(WAIT, start)
    b = m.sin(wait)
    region, real = m.analysed(b)
    assert region[a] != region[b]
    assert start not in region
    assert a in real
    assert wait not in real
    assert effective_users(start) == [b]


def test_a_marker_is_a_barrier():
    m = Model()
    a = m.call(UNSHARD, m.x, "x", [8, 4], True, GROUP)
    b = m.sin(a)
    region, real = m.analysed(b)
    assert region == {b: 0}
    assert {a, b} <= real


def test_the_parts_of_a_fused_reduction_of_two_results_are_fused_too():
    m = Model()
    both = m.call(aten.var_mean.correction, m.x, [1], correction=0, keepdim=True)
    mean = m.call(operator.getitem, both, 1)
    last = m.call(aten.sub.Tensor, m.x, mean)
    region, real = m.analysed(last)
    assert len({region[node] for node in (both, mean, last)}) == 1
    assert real == {m.x, mean, last}


def test_regions_are_numbered_in_the_order_of_the_graph():
    m = Model()
    a = m.sin(m.x)
    b = m.sin(m.mm(a))
    c = m.sin(m.mm(b))
    region, _ = m.analysed(c)
    assert [region[node] for node in (a, b, c)] == [0, 1, 2]


@pytest.mark.parametrize("depth", [1, 5])
def test_no_kernel_is_left_and_entered_again(depth: int):
    # Diamonds of a pointwise operator, around a product, again and again.
    m = Model()
    value = m.x
    for _ in range(depth):
        side = m.sin(value)
        value = m.add(m.sin(side), m.mm(side))
    region, _ = m.analysed(value)
    after: dict[fx.Node, set[int]] = {}
    for node in value.graph.nodes:
        if node.op == "output":
            continue
        before = set().union(*[after[source] for source in node.all_input_nodes])
        left = {r for r in before if region.get(node) != r}
        # Regions left on the way here: this node may belong to none of them.
        for source in node.all_input_nodes:
            if region.get(source) is not None and region.get(source) != region.get(node):
                left.add(region[source])
        assert region.get(node) not in left
        assert not any(
            region.get(node) in after[source] and region.get(source) != region.get(node)
            for source in node.all_input_nodes
        )
        after[node] = left | before
