"""Hoist: gradients of weights before what is passed on, and nothing else in another order."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.graph.fx_utils import positions
from passes.graph.verifier import check
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.overlap.hoist_gradients import hoist
from passes.types.decision import Decision
from tests.passes.graphs import GROUP, GraphBuilder, context, parameter

aten = torch.ops.aten
ROWS, WIDTH = 4, 6
SHAPE = (WIDTH, WIDTH)


class Backward(GraphBuilder):
    """A backward's graph of square layers, one parameter each, on two ranks."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.shards = {name: self.parameter(name, [WIDTH // 2, WIDTH]) for name in names}

    def read(self, name: str) -> fx.Node:
        return self.call(UNSHARD, self.shards[name], name, list(SHAPE), True, GROUP)

    def reduced(self, name: str, gradient: fx.Node) -> fx.Node:
        return self.call(REDUCE_GRAD, gradient, self.shards[name], name, True, GROUP)

    def hoisted(self, *outputs: fx.Node | None) -> tuple[fx.GraphModule, dict[fx.Node, int]]:
        """The graph after the pass, and the place of each of its nodes."""
        gm = self.finish(*outputs)
        parameters = [parameter(name, SHAPE) for name in self.names]
        gm = hoist(gm, context(parameters, Decision.SHARD_REGATHER))
        check(gm, "hoist")
        return gm, positions(gm.graph)


def test_the_gradient_of_a_weight_comes_before_that_of_the_input():
    backward = Backward("w")
    dy, x = backward.input("dy", [ROWS, WIDTH]), backward.input("x", [ROWS, WIDTH])
    weight = backward.read("w")
    dx = backward.call(aten.mm.default, dy, weight)
    flipped = backward.call(aten.permute.default, dy, [1, 0])
    reduced = backward.reduced("w", backward.call(aten.mm.default, flipped, x))
    _, at = backward.hoisted(reduced, dx)
    assert at[reduced] < at[weight] < at[dx]


def test_nothing_moves_above_what_it_needs_nor_what_others_need():
    backward = Backward("w", "b")
    dy, x = backward.input("dy", [ROWS, WIDTH]), backward.input("x", [ROWS, WIDTH])
    inner = backward.call(aten.mul.Tensor, dy, 2.0)
    shared = backward.call(aten.mul.Tensor, x, 3.0)
    dx = backward.call(aten.mm.default, inner, backward.read("w"))
    flipped = backward.call(aten.permute.default, inner, [1, 0])
    w = backward.reduced("w", backward.call(aten.mm.default, flipped, shared))
    reader = backward.call(aten.add.Tensor, dx, shared)
    b = backward.reduced("b", backward.call(aten.sum.dim_IntList, dx, [0], True))
    _, at = backward.hoisted(w, b, reader)
    assert at[inner] < at[shared] < at[w] < at[dx]  # what others need stays where it is
    assert at[dx] < at[b] < at[reader]


def test_gradients_that_need_the_same_keep_their_order():
    backward = Backward("w", "v", "u")
    dy = backward.call(aten.mul.Tensor, backward.input("dy", list(SHAPE)), 2.0)
    last = backward.call(aten.mul.Tensor, dy, 3.0)
    gradients = [backward.call(aten.mul.Tensor, dy, float(factor)) for factor in range(3)]
    # Wherever their markers stand.
    pairs = list(zip(backward.names, gradients, strict=True))
    found = [backward.reduced(name, gradient) for name, gradient in reversed(pairs)][::-1]
    _, at = backward.hoisted(*found, last)
    assert at[dy] < at[found[0]] < at[found[1]] < at[found[2]] < at[last]


def test_a_gradient_that_only_needs_inputs_comes_first():
    backward = Backward("w", "v")
    dy, tangent = backward.input("dy", list(SHAPE)), backward.input("tangent", list(SHAPE))
    passed = backward.call(aten.mul.Tensor, dy, 2.0)
    direct = backward.reduced("v", tangent)
    gm, at = backward.hoisted(None, direct, passed)
    assert at[direct] < at[passed]
    assert all(node.op == "placeholder" for node in list(gm.graph.nodes)[: at[direct]])


def test_random_numbers_keep_their_order():
    backward = Backward("w")
    dy = backward.input("dy", list(SHAPE))
    first = backward.call(aten.bernoulli.p, dy, 0.5)
    second = backward.call(aten.bernoulli.p, dy, 0.5)
    reduced = backward.reduced("w", second)
    _, at = backward.hoisted(reduced, first)
    assert at[first] < at[second] < at[reduced]


@pytest.mark.parametrize("outputs", [0, 1])
def test_a_graph_without_gradients_is_left_alone(outputs: int):
    builder = GraphBuilder()
    x = builder.input("x", [ROWS, WIDTH])
    y = builder.call(aten.mul.Tensor, x, 2.0)
    gm = builder.finish(*[y][:outputs])
    before = [node.name for node in gm.graph.nodes]
    after = hoist(gm, context([parameter("w", SHAPE)], Decision.SHARD_REGATHER))
    assert [node.name for node in after.graph.nodes] == before
