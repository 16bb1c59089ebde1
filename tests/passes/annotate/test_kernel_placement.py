"""Kernels: results that Inductor writes together, and where."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from passes.annotate.kernel_placement import FAR_KERNELS, Kernels
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import positions
from passes.graph.metadata import REGION
from tests.passes.graphs import price
from tests.passes.simulate.test_simulator import Priced

aten = torch.ops.aten


def fused(
    b: Priced, target: object, *args: object, memory_bytes: int = 0, region: int = 0
) -> fx.Node:
    """A node of a fused region."""
    node = price(b.call(target, *args), 0.0, memory_bytes)
    REGION.set(node, region)
    return node


def places(b: Priced, *outputs: fx.Node) -> dict[fx.Node, int]:
    """Where each kernel runs, in a graph that returns these."""
    dataflow = Dataflow(b.finish(*outputs).graph)
    found = Kernels(dataflow).places(range(len(dataflow.nodes)))
    return dict(zip(dataflow.nodes, found, strict=True))


def test_results_that_share_what_they_read_are_written_by_the_first_ones_kernel():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    inside = fused(b, aten.sin.default, source)
    first = fused(b, aten.cos.default, inside, memory_bytes=10)
    product = b.kernel(first, memory_bytes=1)
    second = fused(b, aten.mul.Tensor, source, inside, memory_bytes=10)
    found = b.simulated(product, b.kernel(second, memory_bytes=1))
    place = positions(b.graph)
    runs = dict(zip(place, Kernels(Dataflow(b.graph)).places(range(len(place))), strict=True))
    assert runs[second] == runs[first] == place[first]
    assert runs[product] == place[product]
    # Both results are there as the kernel runs, and none in the source's place: both read it.
    assert found.memory.curve == [0, 10, 10, 30, 21, 11, 12, 2]


def test_a_result_may_be_in_the_place_of_what_was_read_for_one_that_it_needs_itself():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    second = fused(b, aten.mul.Tensor, source, first, memory_bytes=10)
    found = b.simulated(b.kernel(first, second, memory_bytes=1))
    assert found.memory.curve == [0, 10, 20, 20, 21, 1]


def test_a_result_that_needs_something_later_has_a_kernel_of_its_own():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    product = b.kernel(first, memory_bytes=10)
    inside = fused(b, aten.add.Tensor, source, product)
    second = fused(b, aten.sin.default, inside, memory_bytes=10)
    runs = places(b, second)
    assert runs[second] == list(runs).index(second)


def test_a_result_over_other_elements_has_a_kernel_of_its_own():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    other = fused(b, aten.cat.default, [source, source], memory_bytes=20)
    runs = places(b, first, other)
    assert runs[other] == list(runs).index(other)


def test_regions_that_read_a_same_tensor_of_their_size_are_one_kernel():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    product = b.kernel(first, memory_bytes=1)
    inside = fused(b, aten.sin.default, source, region=1)
    second = fused(b, aten.exp.default, inside, memory_bytes=10, region=1)
    late = fused(b, aten.mul.Tensor, source, product, memory_bytes=10, region=2)
    runs = places(b, second, late)
    assert runs[second] == runs[first]
    assert runs[late] == list(runs).index(late)


def test_a_result_joins_the_kernel_of_another_region_that_writes_what_it_reads():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    product = b.kernel(first, memory_bytes=10)
    factor = fused(b, aten.sin.default, first, memory_bytes=10, region=1)
    later = fused(b, aten.mul.Tensor, first, product, memory_bytes=10, region=1)
    runs = places(b, factor, later)
    assert runs[factor] == runs[first]
    assert runs[later] == list(runs).index(later)


def test_regions_that_share_only_a_small_tensor_are_kernels_of_their_own():
    b = Priced()
    bias = price(b.call(aten.sum.dim_IntList, b.tensor("x"), [0]), 0.0, memory_bytes=5)
    other, another = (b.kernel(b.tensor(name), memory_bytes=10) for name in "yz")
    first = fused(b, aten.mul.Tensor, other, bias, memory_bytes=10)
    second = fused(b, aten.mul.Tensor, another, bias, memory_bytes=10, region=1)
    runs = places(b, first, second)
    assert runs[second] == list(runs).index(second)


def test_regions_far_apart_are_kernels_of_their_own():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    between = [b.kernel(source, memory_bytes=1) for _ in range(FAR_KERNELS)]
    second = fused(b, aten.sin.default, source, memory_bytes=10, region=1)
    runs = places(b, first, *between, second)
    assert runs[second] == list(runs).index(second)


def test_a_reduction_runs_over_what_it_reads():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    product = b.kernel(first, memory_bytes=1)
    total = fused(b, aten.sum.default, first, memory_bytes=1)
    runs = places(b, product, total)
    assert runs[total] == runs[first]


def test_what_is_computed_of_a_sum_alone_reads_the_sum_and_not_what_was_summed():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    total = fused(b, aten.sum.dim_IntList, source, [1], True)  # a buffer, if a small one
    first = fused(b, aten.sub.Tensor, source, total, memory_bytes=10)
    product = b.kernel(first, memory_bytes=1)
    last = fused(b, aten.rsqrt.default, total, memory_bytes=1)
    found = b.simulated(product, last)
    place = positions(b.graph)
    runs = dict(zip(place, Kernels(Dataflow(b.graph)).places(range(len(place))), strict=True))
    assert runs[last] == runs[first] == runs[total] == place[total]
    # Once the first result is in its place, the source is no more.
    assert found.memory.curve == [0, 10, 11, 11, 12, 2, 2]


@pytest.mark.parametrize(
    ("dims", "joins"), [([0], False), ([1], True), ([-1], True), ([0, 1], True)]
)
def test_a_sum_over_columns_has_a_kernel_of_its_own(dims, joins):
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    product = b.kernel(first, memory_bytes=1)
    total = fused(b, aten.sum.dim_IntList, first, dims, memory_bytes=1)
    runs = places(b, product, total)
    assert (runs[total] == runs[first]) == joins


def test_a_sum_over_the_one_dimension_of_a_scalar_is_none_over_columns():
    b = Priced()
    scalar = b.call(aten.sum.default, b.kernel(b.tensor("x"), memory_bytes=10))
    first = fused(b, aten.cos.default, price(scalar, 0.0, 1), memory_bytes=1)
    total = fused(b, aten.sum.dim_IntList, first, [-1], memory_bytes=1)
    runs = places(b, first, total)
    assert runs[total] == runs[first]


def test_two_sums_over_columns_of_one_tensor_are_one_kernel():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = fused(b, aten.sum.dim_IntList, source, [0], memory_bytes=1)
    product = b.kernel(source, memory_bytes=1)
    second = fused(b, aten.sum.dim_IntList, source, [0], True, memory_bytes=1)
    runs = places(b, first, product, second)
    assert runs[second] == runs[first]


def test_what_a_result_reads_through_a_wait_is_there_after_the_wait():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    gathered = b.gather(source, memory_bytes=10)
    first = fused(b, aten.cos.default, source, memory_bytes=10)
    wait = b.wait(gathered)
    second = fused(b, aten.add.Tensor, first, b.view(wait), memory_bytes=10)
    runs = places(b, first, second)
    assert runs[second] == list(runs).index(second)


def test_all_results_of_one_operator_are_there_at_once():
    b = Priced()
    x = b.tensor("x")
    both = price(b.call(aten.linalg_qr.default, x), 0.0, 0)
    between = b.kernel(x)
    part = price(b.call(operator.getitem, both, 1), 0.0, 4)
    runs = places(b, between, part)
    assert runs[part] == list(runs).index(both)
