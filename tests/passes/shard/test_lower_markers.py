"""Shard: the numbers of markers and of the collectives they become, on several ranks at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from torch import fx

from passes.graph.fx_utils import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    is_collective,
    is_marker,
)
from passes.graph.metadata import COLLECTIVE, GRADIENT_OF
from passes.ops.p2p import EXCHANGE, GATHER_PARTS
from passes.ops.packing import PAD_ROWS, TRIM_ROWS
from passes.shard.lower_markers import shard
from passes.types.decision import Decision
from passes.types.hardware import LinkRate
from tests.passes.examples import examples
from tests.passes.graphs import hardware
from tests.passes.ranks_interpreter import run_ranks
from tests.passes.steps import Step, Weight, assert_close, steps

aten = torch.ops.aten

# Rows that 2, 3 and 4 ranks divide or not, one with fewer rows than some worlds have ranks
# (whose last ranks then hold no row), several precisions, replicated between sharded.
MIXED = Step(
    (
        Weight((12, 3)),
        Weight((5,), torch.float64, Decision.SHARD_KEEP, returned=True),
        Weight((2, 7, 2), torch.bfloat16, transposed=True),
        Weight((7,), decision=Decision.REPLICATE),
        Weight((3, 2), decision=Decision.REPLICATE, returned=True, transposed=True),
        Weight((11, 2), trained=False),
    )
)


def targets(gm: fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def collectives(gm: fx.GraphModule) -> list[tuple[str, str]]:
    return [
        (COLLECTIVES[node.target], COLLECTIVE.of(node).label)
        for node in gm.graph.nodes
        if is_collective(node)
    ]


def lowered(weight: Weight, **changes: object) -> fx.GraphModule:
    """Rank 0's graph of a step with one weight."""
    return Step((weight,), **changes).lower(0, shard)  # type: ignore[arg-type]


@pytest.mark.parametrize("uses_p2p", [False, True], ids=["gather", "exchange"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_compute_what_the_markers_mean(world_size: int, uses_p2p: bool):
    step = dataclasses.replace(MIXED, world_size=world_size, uses_p2p=uses_p2p)
    for found, wanted in zip(step.run(shard), step.run(), strict=True):
        assert_close(found, wanted)


@examples(20)
@given(steps())
def test_collectives_compute_what_the_markers_mean_in_any_step(step: Step):
    for found, wanted in zip(step.run(shard), step.run(), strict=True):
        assert_close(found, wanted)


def test_no_marker_is_left():
    assert not any(is_marker(node) for gm in MIXED.lowered(shard) for node in gm.graph.nodes)


def test_a_sharded_parameter_is_gathered_and_its_gradient_reduced():
    assert collectives(lowered(Weight((4, 2)))) == [
        ("all_gather", "gather w0"),
        ("reduce_scatter", "reduce w0"),
    ]


def test_a_replicated_parameter_is_read_in_place_and_its_gradient_all_reduced():
    gm = lowered(Weight((4, 2), decision=Decision.REPLICATE))
    assert collectives(gm) == [("all_reduce", "reduce w0")]
    readers = gm.graph.find_nodes(op="placeholder")[0].users
    assert [reader.target for reader in readers] == [aten._to_copy.default, aten.mul.Tensor]


def test_a_replicated_parameter_that_is_returned_is_copied():
    # AOTAutograd takes a returned input for an alias that it did not plan for.
    step = Step((Weight((4, 2), decision=Decision.REPLICATE, returned=True),))
    values = step.values()
    outputs = run_ranks(step.lowered(shard), values)
    assert torch.equal(outputs[0][-1], values[0][0])
    assert outputs[0][-1].data_ptr() != values[0][0].data_ptr()


def test_one_rank_sends_nothing_and_its_gradients_have_the_strides_of_the_parameters():
    # Autograd would copy a gradient with other strides, outside of the graph.
    whole = Decision.REPLICATE
    step = Step(
        (Weight((4, 2), decision=whole), Weight((3, 2), decision=whole, transposed=True)), 1
    )
    gm = step.lower(0, shard)
    assert not any(is_collective(node) or is_marker(node) for node in gm.graph.nodes)
    for found, wanted in zip(step.run(shard), step.run(), strict=True):
        assert_close(found, wanted)
    gradients = [node for node in gm.graph.nodes if GRADIENT_OF.is_set(node)]
    assert sorted(map(GRADIENT_OF.of, gradients)) == ["w0", "w1"]
    assert all(node.meta["val"].is_contiguous() for node in gradients)


def test_a_frozen_parameter_is_not_reduced():
    assert collectives(lowered(Weight((4, 2), trained=False))) == [("all_gather", "gather w0")]


def test_rows_that_the_ranks_divide_are_neither_padded_nor_trimmed():
    found = targets(lowered(Weight((4, 2))))
    assert PAD_ROWS not in found
    assert TRIM_ROWS not in found
    assert aten.constant_pad_nd.default not in found


def test_rows_that_the_ranks_do_not_divide_are_padded_and_trimmed():
    gm = lowered(Weight((5, 2)))
    (pad,) = gm.graph.find_nodes(op="call_function", target=PAD_ROWS)
    (trim,) = gm.graph.find_nodes(op="call_function", target=TRIM_ROWS)
    (gather,) = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    assert list(pad.meta["val"].shape) == [3, 2]
    assert list(gather.meta["val"].shape) == [2 * 3 * 2]
    assert list(trim.meta["val"].shape) == [3, 2]


def test_a_rank_without_rows_takes_part_and_keeps_nothing():
    # Five rows on four ranks: two, two, one, none.
    step = Step((Weight((5, 2)),), world_size=4)
    gradients = [output[1] for output in step.run(shard)]
    assert [len(gradient) for gradient in gradients] == [2, 2, 1, 0]


def test_by_exchange_nothing_but_exchanges_and_all_reduces_is_used():
    step = dataclasses.replace(MIXED, uses_p2p=True)
    used = {node.target for node in step.lower(0, shard).graph.nodes if is_collective(node)}
    assert used == {GATHER_PARTS, EXCHANGE, ALL_REDUCE}


@pytest.mark.parametrize(
    ("scatter_seconds_per_byte", "wanted"), [(1e-8, REDUCE_SCATTER), (1e-6, ALL_TO_ALL)]
)
def test_a_gradient_is_reduced_by_what_the_profile_says_is_faster(
    scatter_seconds_per_byte: float, wanted: object
):
    rates = dict(hardware().collectives)
    rates["reduce_scatter"] = LinkRate(1e-6, scatter_seconds_per_byte)
    gm = lowered(Weight((4, 2)), hardware=hardware(collectives=rates))
    assert wanted in targets(gm)


def test_gradients_say_whose_they_are():
    gm = MIXED.lower(0, shard)
    outputs = gm.graph.output_node().args[0]
    said = [GRADIENT_OF.get(node) for node in outputs[1:6]]  # type: ignore[union-attr]
    assert said == ["w0", "w1", "w2", "w3", "w4"]


def test_all_ranks_start_the_same_collectives_for_different_batches():
    step = dataclasses.replace(MIXED, world_size=3, batch_rows=(1, 9, 4))
    first, *others = [collectives(gm) for gm in step.lowered(shard)]
    assert all(other == first for other in others)
