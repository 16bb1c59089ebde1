"""FLOPs: what torch's registry lacks, by hand; symbolic sizes; what has no formula."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes._torch import FakeTensorMode
from passes.annotate import flops as module
from passes.annotate.flops import flops_of
from tests.passes.graphs import GraphBuilder

aten = torch.ops.aten


def test_a_registered_operator_counts_as_torch_counts_it():
    b = GraphBuilder()
    product = b.call(aten.bmm.default, b.input("x", [3, 10, 20]), b.input("y", [3, 20, 30]))
    assert flops_of(product) == 2 * 3 * 10 * 20 * 30


def test_products_with_vectors_count_every_element_of_the_matrix():
    b = GraphBuilder()
    matrix, vector, bias = b.input("m", [10, 20]), b.input("v", [20]), b.input("b", [10])
    assert flops_of(b.call(aten.mv.default, matrix, vector)) == 400
    assert flops_of(b.call(aten.addmv.default, bias, matrix, vector)) == 400
    assert flops_of(b.call(aten.dot.default, vector, vector)) == 40


def test_a_sum_of_products_counts_each():
    b = GraphBuilder()
    x, y = b.input("x", [3, 10, 20]), b.input("y", [3, 20, 30])
    added = b.call(aten.addbmm.default, b.input("bias", [10, 30]), x, y)
    assert flops_of(added) == 2 * 3 * 10 * 20 * 30


def test_attention_on_a_cpu_is_two_products_and_its_backward_five():
    b = GraphBuilder()
    q, k, v, gradient = (b.input(name, [2, 4, 8, 16]) for name in "qkvg")
    forward = b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)
    product = 2 * (2 * 4) * 8 * 8 * 16
    assert flops_of(forward) == 2 * product
    lse = b.input("lse", [2, 8, 4])
    backward = b.call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(gradient, q, k, v, gradient, lse, 0.0, False),
    )
    assert flops_of(backward) == 5 * product


def test_a_fourier_transform_counts_the_logarithm_of_its_length():
    b = GraphBuilder()
    x = b.input("x", [6, 16], torch.complex64)
    assert flops_of(b.call(aten._fft_c2c.default, x, [1], 0, True)) == 5 * 6 * 16 * 4
    real = b.input("real", [6, 16])
    assert flops_of(b.call(aten._fft_r2c.default, real, [1], 0, True)) == 5 * 6 * 16 * 4


def test_symbolic_sizes_count_by_their_hints_and_are_not_guarded_on():
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    value = mode.from_tensor(torch.zeros(10, 20), static_shapes=False)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    product = graph.call_function(aten.mm.default, (x, x))
    with mode:
        product.meta["val"] = value @ value.t()
        x.meta["val"] = value
        other = graph.placeholder("y")
        other.meta["val"] = value.t()
    product.args = (x, other)
    before = len(shapes.guards)
    assert flops_of(product) == 2 * 10 * 20 * 10
    assert len(shapes.guards) == before


@pytest.fixture
def said(caplog):
    module._say.cache_clear()
    caplog.set_level(logging.DEBUG, logger="passes")
    yield caplog
    module._say.cache_clear()


def test_what_has_no_formula_is_named_once(said):
    b = GraphBuilder()
    ordered = b.call(aten.sort.default, b.input("x", [10]))
    assert [flops_of(ordered) for _ in range(3)] == [0, 0, 0]
    assert len(said.records) == 1
    assert "sort_default (aten.sort.default) is priced by its bytes" in said.text


def test_a_formula_that_does_not_fit_is_said_and_not_raised(said):
    b = GraphBuilder()
    product = b.call(aten.mm.default, b.input("x", [2, 3]), b.input("y", [3, 4]))
    product.meta["val"] = product.args[0].meta["val"]
    product.args = (b.input("z", [5, 7]), product.args[1])
    assert flops_of(product) == 0
    assert "its FLOP formula fails" in said.text
