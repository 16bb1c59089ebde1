"""Dedupe: one gather and one reduction a parameter, and the same numbers on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.graph.verifier import check
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.shard.dedupe_markers import dedupe
from passes.shard.lower_markers import shard
from passes.types.decision import Decision
from tests.passes.graphs import GROUP, GraphBuilder, context, local_rows, local_shape, parameter
from tests.passes.ranks_interpreter import run_ranks

aten = torch.ops.aten
SHAPES = {"w": (5, 2), "v": (4, 2)}


class Joint(GraphBuilder):
    """A joint graph's markers, for a rank of some world."""

    def __init__(self, world_size: int = 2, rank: int = 0, sharded: bool = True) -> None:
        super().__init__()
        self.sharded = sharded
        self.shards = {
            name: self.parameter(
                name, local_shape(shape, world_size, rank) if sharded else list(shape)
            )
            for name, shape in SHAPES.items()
        }

    def read(self, name: str) -> fx.Node:
        args = (self.shards[name], name, list(SHAPES[name]), self.sharded, GROUP)
        return self.call(UNSHARD, *args)

    def reduced(self, name: str, gradient: fx.Node) -> fx.Node:
        return self.call(REDUCE_GRAD, gradient, self.shards[name], name, self.sharded, GROUP)

    def add(self, first: fx.Node, second: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, first, second)


def count(gm: fx.GraphModule, target: object) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))  # type: ignore[arg-type]


def used_three_times(world_size: int, rank: int, sharded: bool) -> fx.GraphModule:
    """``w`` read three times beside ``v``; each read gives a gradient of its own kind."""
    joint = Joint(world_size, rank, sharded)
    batch = joint.input("x", [5, 2])
    reads = [joint.read("w") for _ in range(3)]
    other = joint.read("v")
    value = joint.add(joint.add(reads[0], reads[1]), joint.call(aten.mul.Tensor, reads[2], batch))
    gradients = [joint.call(aten.mul.Tensor, batch, float(k + 1)) for k in range(3)]
    parts = [joint.reduced("w", gradient) for gradient in gradients]
    total = joint.add(joint.add(parts[0], parts[1]), parts[2])
    return joint.finish(value, total, joint.reduced("v", other))


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_merging_changes_no_value(world_size: int, sharded: bool):
    generator = torch.Generator().manual_seed(3)
    wholes = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
    inputs = []
    for rank in range(world_size):
        spans = [local_rows(len(whole), world_size, rank) for whole in wholes]
        mine = [w[a:b] if sharded else w for w, (a, b) in zip(wholes, spans, strict=True)]
        inputs.append([*mine, torch.randn(5, 2, generator=generator)])

    def graphs(*passes: object) -> list[fx.GraphModule]:
        lowered = []
        for rank in range(world_size):
            decision = Decision.SHARD_REGATHER if sharded else Decision.REPLICATE
            parameters = [parameter(name, shape) for name, shape in SHAPES.items()]
            ctx = context(parameters, decision, world_size=world_size, rank=rank)
            gm = used_three_times(world_size, rank, sharded)
            for one in passes:
                gm = one(gm, ctx)  # type: ignore[operator]
                check(gm, str(one))
            lowered.append(gm)
        return lowered

    wanted = run_ranks(graphs(), inputs)
    for found in (run_ranks(graphs(dedupe), inputs), run_ranks(graphs(dedupe, shard), inputs)):
        torch.testing.assert_close(found, wanted)


def test_one_unshard_and_one_reduction_are_left_of_each_parameter():
    gm = dedupe(used_three_times(2, 0, True), context())
    assert (count(gm, UNSHARD), count(gm, REDUCE_GRAD)) == (2, 2)


def test_the_unshard_left_is_the_first():
    joint = Joint()
    first, second = joint.read("w"), joint.read("w")
    gm = dedupe(joint.finish(joint.add(second, first)), context())
    assert gm.graph.find_nodes(op="call_function", target=UNSHARD) == [first]


def test_the_sum_is_reduced_whole_and_says_so():
    joint = Joint()
    gradients = [joint.input(f"g{k}", [5, 2]) for k in range(2)]
    total = joint.add(*[joint.reduced("w", gradient) for gradient in gradients])
    gm = dedupe(joint.finish(total), context())
    (addition,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    (reduction,) = gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    assert addition.args == tuple(gradients)
    assert list(addition.meta["val"].shape) == [5, 2]  # before, the shards' three rows were added
    assert reduction.args[0] is addition
    assert list(reduction.meta["val"].shape) == [3, 2]
    check(gm, "dedupe")


def test_reductions_of_different_parameters_are_not_merged():
    # Four rows on one rank and on two: the shards of w and v could be added by their shapes.
    joint = Joint()
    joint.shards["v"] = joint.input("like_w", [3, 2])
    parts = [joint.reduced(name, joint.input(f"g{name}", [5, 2])) for name in ("w", "v")]
    gm = dedupe(joint.finish(joint.add(*parts)), context())
    assert count(gm, REDUCE_GRAD) == 2


def test_a_reduction_that_something_else_reads_is_not_merged():
    joint = Joint()
    parts = [joint.reduced("w", joint.input(f"g{k}", [5, 2])) for k in range(2)]
    gm = dedupe(joint.finish(joint.add(*parts), parts[0]), context())
    assert count(gm, REDUCE_GRAD) == 2


def test_a_sum_with_something_that_is_no_reduction_is_left_alone():
    joint = Joint()
    part = joint.reduced("w", joint.input("g", [5, 2]))
    gm = dedupe(joint.finish(joint.add(part, joint.input("decay", [3, 2]))), context())
    assert count(gm, REDUCE_GRAD) == 1
    (reduction,) = gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    assert reduction.args[0].name == "g"  # type: ignore[union-attr]


def test_a_scaled_sum_is_left_alone():
    joint = Joint()
    parts = [joint.reduced("w", joint.input(f"g{k}", [5, 2])) for k in range(2)]
    gm = dedupe(joint.finish(joint.call(aten.add.Tensor, *parts, alpha=2)), context())
    assert count(gm, REDUCE_GRAD) == 2


def test_a_gradient_added_to_itself_is_counted_twice():
    joint = Joint(sharded=False)
    part = joint.reduced("w", joint.input("g", [5, 2]))
    gm = dedupe(joint.finish(joint.add(part, part)), context())
    inputs = [[torch.zeros(5, 2), torch.zeros(4, 2), torch.ones(5, 2)]] * 2
    assert run_ranks([gm, gm], inputs)[0][0].tolist() == [[2.0, 2.0]] * 5
