"""Save slices: the backward gets slices, of activations and of kept weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from passes.capture.captured_step import lay_out
from passes.graph.fx_utils import is_collective
from passes.graph.metadata import COLLECTIVE, GATHERED
from passes.pipeline import Stage, default_passes, run
from passes.pricing.predict import predict
from passes.types.context import Phase
from passes.types.decision import Decision
from passes.types.plan import OF_INPUT
from tests.chosen import more
from tests.passes.capture.test_captured_step import decided
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import (
    AGAIN,
    UP_AND_DOWN,
    Experts,
    Guessing,
    Mlp,
    Words,
    check_step,
    in_slices,
    logits_of,
    sliced,
    trained,
)


@pytest.mark.parametrize(
    ("world_size", "slices", "hidden", "kept_slices"),
    [
        (2, 2, 48, 1),
        (4, 4, 48, 3),
        (2, 3, 23, 1),
        (4, 8, 23, 5),
        (2, 2, 9, 2),
        *more((4, 2, 48, 1), (2, 4, 48, 3), (4, 3, 23, 1), (2, 8, 23, 5), (4, 2, 9, 2)),
    ],
)
def test_some_slices_of_an_mlp_kept(world_size: int, slices: int, hidden: int, kept_slices: int):
    torch.manual_seed(0)
    batches = [torch.randn(3, 6) for _ in range(world_size)]
    training = trained(Mlp(hidden, bias=True), batches)
    check_step(training, in_slices(slices), kept_slices=kept_slices)


def test_some_slices_of_an_embedding_and_a_batched_weight_kept():
    torch.manual_seed(0)
    words = [torch.randint(0, 11, (2, 5)) for _ in range(2)]
    training = trained(Words(), words)
    check_step(training, {"words.weight": (2, 1, None)}, kept_slices=1)
    experts = trained(Experts(), [torch.randn(5, 3, 6) for _ in range(2)])
    for along in (0, 1, 2):
        check_step(experts, {"weight": (2, along, None)}, kept_slices=1)


@pytest.mark.parametrize("kept_slices", range(5))
def test_what_is_kept_is_not_gathered_again(kept_slices: int):
    step, ctx = capture_step(Mlp(48, bias=False), torch.randn(3, 6), world_size=2)
    plan = decided(ctx, AGAIN, bucket_bytes=0)
    found = predict(step, sliced(plan, in_slices(4), kept_slices), ctx, default_passes())
    gathered = {
        name
        for node in found.backward.graph.nodes
        if is_collective(node) and (purpose := COLLECTIVE.of(node)).gathers
        for name in purpose.names
    }
    assert {name for name in gathered if "#" in name} == {
        f"{name}#{index}"
        for name in (UP_AND_DOWN if kept_slices < 4 else ())
        for index in range(kept_slices, 4)
    }
    given = [
        GATHERED.of(node)
        for node in found.backward.graph.find_nodes(op="placeholder")
        if GATHERED.is_set(node)
    ]
    assert sorted(given) == sorted(
        f"{name}#{index}" for name in UP_AND_DOWN for index in range(kept_slices)
    )


def test_every_slice_that_is_kept_takes_its_own_bytes_and_spares_a_gather():
    step, ctx = capture_step(Mlp(1 << 12, bias=False), torch.randn(3, 6), world_size=2)
    tight = ctx.replace(limit_bytes=1)  # no overlap
    plan = decided(ctx, AGAIN, bucket_bytes=0)
    said = [
        predict(step, sliced(plan, in_slices(8), kept), tight, default_passes()).prediction
        for kept in range(8)
    ]
    assert all(one.exposed_seconds > more.exposed_seconds for one, more in itertools.pairwise(said))
    # With the first few the most is held in the step of the optimizer, or later in the backward.
    slice_bytes = sum(ctx.parameter(name).full_bytes for name in UP_AND_DOWN) // 8
    more_bytes = [more.peak_bytes - one.peak_bytes for one, more in itertools.pairwise(said)]
    assert more_bytes[4:] == [slice_bytes] * 3
    keep = decided(ctx, Decision.SHARD_KEEP, bucket_bytes=0)
    whole = predict(step, keep, tight, default_passes())
    assert said[7].peak_bytes < whole.prediction.peak_bytes


@pytest.mark.parametrize("slices", [2, 5])
def test_logits_are_never_there_whole(slices: int):
    batch = torch.randint(0, 64, (2, 5))
    model = Guessing()
    captured, ctx = capture_step(model, batch, world_size=2)
    plan = sliced(
        decided(ctx, AGAIN, bucket_bytes=0), {"head.weight": (slices, OF_INPUT, None)}
    ).replace(recompute=logits_of(model, batch))
    laid = lay_out(captured, plan, ctx, default_passes())
    for gm, phase in ((laid.forward, Phase.FORWARD), (laid.backward, Phase.BACKWARD)):
        lowered = run(default_passes(), Stage.PARTS, gm, ctx.replace(plan=plan, phase=phase))
        rows = [
            node.meta["val"].shape[0]
            for node in lowered.graph.nodes
            if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].shape[1:] == (64,)
        ]
        assert rows
        assert max(row for row in rows if row != 8) == 10 // slices  # 8: the weight, laid out
