"""Check: each way of breaking a graph is found, and the error names the pass and the node."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from passes.graph.fx_utils import ALL_GATHER, ALL_REDUCE, WAIT
from passes.graph.metadata import SAVES
from passes.graph.step_module import step_module
from passes.graph.verifier import InvalidGraph, check, check_step
from passes.ops.p2p import EXCHANGE
from passes.ops.packing import MEAN_RANKS
from tests.passes.graphs import GROUP, GraphBuilder
from tests.passes.steps import LOWERING, Step, Weight

aten = torch.ops.aten


def test_a_sound_graph_passes():
    builder = GraphBuilder()
    start = builder.call(ALL_GATHER, builder.input("x", [4, 2]), 2, GROUP)
    check(builder.finish(builder.call(aten.sin.default, builder.call(WAIT, start))), "mine")


def test_what_the_passes_leave_passes():
    step = Step((Weight((5, 2)), Weight((4, 4), transposed=True)), world_size=3, bucket_bytes=1000)
    for gm in step.lowered(*LOWERING):
        check(gm, "mine")


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("dtype", torch.empty(4, 2, dtype=torch.float64)),
        ("shape", torch.empty(4, 3)),
        ("strides", torch.empty(2, 4).t()),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wrong_in_it(what: str, wrong: torch.Tensor):
    builder = GraphBuilder()
    node = builder.call(aten.sin.default, builder.input("x", [4, 2]))
    node.meta["val"] = builder.mode.from_tensor(wrong)
    with pytest.raises(InvalidGraph, match=rf"after pass 'mine': node {node} .*says {what} "):
        check(builder.finish(node), "mine")


@pytest.mark.parametrize("what", ["value", "input", "number", "operator"])
def test_what_was_right_and_is_changed_is_looked_at_again(what: str):
    builder = GraphBuilder()
    x, y = builder.input("x", [4, 2]), builder.input("y", [4, 3])
    node = builder.call(aten.sum.dim_IntList, x, [1])
    gm = builder.finish(node, y)
    for _ in range(2):
        check(gm, "before")
    if what == "value":
        node.meta["val"] = y.meta["val"]
    elif what == "input":
        x.meta["val"] = builder.mode.from_tensor(torch.empty(5, 2))
    elif what == "number":
        node.args = (x, [0])
    else:
        node.target = aten.cumsum.default
        node.args = (x, 1)
    with pytest.raises(InvalidGraph, match=rf"after pass 'mine': node {node} .*says shape"):
        check(gm, "mine")


def test_checking_keeps_no_graph_alive():
    builder = GraphBuilder()
    gm = builder.finish(builder.call(aten.sin.default, builder.input("x", [4, 2])))
    check(gm, "mine")
    left = [weakref.ref(node) for node in gm.graph.nodes]
    del gm, builder
    gc.collect()
    assert not any(one() for one in left)


def test_strides_of_a_single_element_mean_nothing():
    builder = GraphBuilder()
    node = builder.call(aten.sin.default, builder.input("x", [1, 1]))
    node.meta["val"] = builder.mode.from_tensor(torch.empty_strided((1, 1), (7, 3)))
    check(builder.finish(node), "mine")


def test_a_missing_value_is_named():
    builder = GraphBuilder()
    node = builder.call(aten.sin.default, builder.input("x", [4]))
    del node.meta["val"]
    with pytest.raises(InvalidGraph, match=rf"after pass 'mine': node {node} .*no meta\['val'\]"):
        check(builder.finish(node), "mine")


def test_an_input_of_a_collective_must_be_contiguous():
    builder = GraphBuilder()
    turned = builder.call(aten.t.default, builder.input("x", [4, 2]))
    start = builder.call(ALL_REDUCE, turned, "sum", GROUP)
    with pytest.raises(InvalidGraph, match=rf"after pass 'mine': the input {turned} .*{start} is"):
        check(builder.finish(builder.call(WAIT, start)), "mine")


def test_a_collective_must_be_waited_for():
    builder = GraphBuilder()
    start = builder.call(ALL_REDUCE, builder.input("x", [4]), "sum", GROUP)
    with pytest.raises(InvalidGraph, match=rf"'mine': collective {start} must be used by one wait"):
        check(builder.finish(start), "mine")


def test_a_collective_nobody_uses_must_be_waited_for_too():
    builder = GraphBuilder()
    x = builder.input("x", [4])
    start = builder.call(ALL_REDUCE, x, "sum", GROUP)
    with pytest.raises(InvalidGraph, match=rf"'mine': collective {start} must be used by one wait"):
        check(builder.finish(x), "mine")


def test_a_collective_must_be_waited_for_once():
    builder = GraphBuilder()
    start = builder.call(ALL_REDUCE, builder.input("x", [4]), "sum", GROUP)
    waits = [builder.call(WAIT, start), builder.call(WAIT, start)]
    with pytest.raises(InvalidGraph, match=rf"'mine': collective {start} must be used by one wait"):
        check(builder.finish(*waits), "mine")


def test_nothing_may_read_a_collectives_output_beside_its_wait():
    builder = GraphBuilder()
    start = builder.call(ALL_REDUCE, builder.input("x", [4]), "sum", GROUP)
    early = builder.call(aten.sin.default, start)
    with pytest.raises(InvalidGraph, match=rf"'mine': collective {start} must be used by one wait"):
        check(builder.finish(early, builder.call(WAIT, start)), "mine")


def test_a_node_before_its_input_is_named():
    builder = GraphBuilder()
    first = builder.call(aten.sin.default, builder.input("x", [4]))
    second = builder.call(aten.cos.default, first)
    gm = builder.finish(second)
    first.prepend(second)
    with pytest.raises(InvalidGraph, match=rf"after pass 'mine': .*{first}"):
        check(gm, "mine")


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_being_sent_must_be_read_after_the_wait(kept: bool):
    builder = GraphBuilder()
    gradient = builder.call(aten.sin.default, builder.input("x", [8]))
    wait = builder.call(WAIT, builder.call(EXCHANGE, gradient, 2, GROUP))
    gm = builder.finish(builder.call(MEAN_RANKS, wait, 2, *([gradient] if kept else [])))
    if kept:
        check(gm, "mine")
    else:
        with pytest.raises(InvalidGraph, match=rf"the input {gradient} of .* may be written to"):
            check(gm, "mine")


def test_a_saved_tensor_that_no_input_of_the_backward_names_is_found():
    forward, backward = GraphBuilder(), GraphBuilder()
    saved = forward.call(aten.sin.default, forward.input("x", [4]))
    sound = forward.finish(saved, saved)
    given = backward.input(saved.name, [4])
    gm = backward.finish(backward.call(aten.neg.default, given))
    check_step(step_module(sound, gm), "mine")
    SAVES.set(given, "another")
    with pytest.raises(
        InvalidGraph, match=r"'mine'.* saves \['sin_default'\].* name \['another'\]"
    ):
        check_step(step_module(sound, gm), "mine")
    SAVES.set(given, saved.name)
    check_step(step_module(sound, gm), "mine")
