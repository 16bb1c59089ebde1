"""Order of slices: one slice after the other, and nothing before them that they do not need."""

from __future__ import annotations

import torch
from torch import fx

from passes._torch import FakeTensorMode
from passes.capture.captured_step import lay_out
from passes.graph.fx_utils import call
from passes.ops.markers import UNSHARD, unshard_of
from passes.ops.slicing import JOIN_SLICES, TAKE_SLICE
from passes.pipeline import default_passes
from passes.split.order_slices import one_slice_after_the_other
from passes.split.split_operators import split
from passes.types.context import Phase
from passes.types.plan import OF_INPUT
from tests.passes.capture.test_captured_step import decided
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import AGAIN, Guessing, sliced

aten = torch.ops.aten


class Drawn:
    """A graph of named nodes, each made of earlier ones; x: [8, 4]."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        with FakeTensorMode():
            self.x.meta["val"] = torch.empty(8, 4)
        self.index: dict[fx.Node, int] = {}

    def add(self, name: str, target, *args, slice_of: int | None = None) -> fx.Node:
        node = call(self.graph, target, args)
        node.name = name
        if slice_of is not None:
            self.index[node] = slice_of
        return node

    def order(self, *results: fx.Node) -> list[str]:
        """The names in the new order."""
        self.graph.output(results)
        one_slice_after_the_other(self.graph, self.index)
        self.graph.lint()
        return [node.name for node in self.graph.nodes if node.op == "call_function"]


def in_two_slices(drawn: Drawn, name: str, source: fx.Node) -> list[fx.Node]:
    return [
        drawn.add(f"{name}{i}", aten.mul.Tensor, source, float(i), slice_of=i) for i in range(2)
    ]


def test_the_nodes_of_a_slice_stand_together():
    drawn = Drawn()
    first = in_two_slices(drawn, "a", drawn.x)
    then = [drawn.add(f"b{i}", aten.sin.default, one, slice_of=i) for i, one in enumerate(first)]
    assert drawn.order(*then) == ["a0", "b0", "a1", "b1"]


def test_a_slice_that_needs_the_whole_of_others_comes_after_them():
    drawn = Drawn()
    first = in_two_slices(drawn, "a", drawn.x)
    whole = drawn.add("whole", aten.add.Tensor, *first)
    then = in_two_slices(drawn, "b", whole)
    assert drawn.order(*then) == ["a0", "a1", "whole", "b0", "b1"]


def test_what_no_slice_needs_stays_behind_and_what_one_needs_goes_ahead():
    drawn = Drawn()
    first = in_two_slices(drawn, "a", drawn.x)
    needed = drawn.add("needed", aten.cos.default, drawn.x)
    other = drawn.add("other", aten.sin.default, drawn.x)
    then = [
        drawn.add(f"b{i}", aten.mul.Tensor, one, needed, slice_of=i) for i, one in enumerate(first)
    ]
    assert drawn.order(other, *then) == ["needed", "a0", "b0", "a1", "b1", "other"]


def test_what_makes_less_than_it_reads_goes_ahead():
    drawn = Drawn()
    first = in_two_slices(drawn, "a", drawn.x)
    total = drawn.add("total", aten.sum.dim_IntList, drawn.x, [0])
    assert drawn.order(total, *first) == ["total", "a0", "a1"]


def test_a_slice_that_nothing_reads_yet_waits_for_its_reader():
    """So no slice for the next operators is gathered while those of these run."""
    drawn = Drawn()
    early = [drawn.add(f"t{i}", TAKE_SLICE, drawn.x, 0, 2, i, 1, 1, slice_of=i) for i in range(2)]
    first = in_two_slices(drawn, "a", drawn.x)
    whole = drawn.add("whole", aten.sum.default, drawn.add("both", aten.add.Tensor, *first))
    then = [
        drawn.add(f"b{i}", aten.mul.Tensor, one, whole, slice_of=i) for i, one in enumerate(early)
    ]
    expected = ["a0", "a1", "both", "whole", "t0", "b0", "t1", "b1"]
    assert drawn.order(*then) == expected


def test_what_no_slice_needs_is_not_put_before_the_slices():
    tokens = torch.randint(0, 64, (2, 5))
    captured, ctx = capture_step(Guessing(), tokens, world_size=2)
    plan = sliced(decided(ctx, AGAIN, bucket_bytes=0), {"head.weight": (2, OF_INPUT, None)})
    laid = lay_out(captured, plan, ctx, default_passes())
    cut = split(laid.backward, ctx.replace(plan=plan, phase=Phase.BACKWARD))
    order = [node for node in cut.graph.nodes if node.target in (UNSHARD, JOIN_SLICES)]
    found = [unshard_of(node).name if node.target is UNSHARD else "joined" for node in order]
    assert found == ["head.weight", "joined", "norm.weight", "mix.weight"]
