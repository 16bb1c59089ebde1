"""Candidates: changes of slices and of decisions leave the rest as it is."""

from __future__ import annotations

import torch

from passes.candidates.candidate import Candidate
from passes.pipeline import default_passes
from passes.pricing.evaluator import PlanEvaluator
from passes.types.decision import Decision
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import Mlp


def test_slices_and_decisions_are_changed_apart():
    step, ctx = capture_step(Mlp(256, bias=False), torch.randn(3, 6), world_size=4)
    evaluator = PlanEvaluator(step, ctx, default_passes())
    key = Candidate((Decision.SHARD_KEEP,) * len(ctx.parameters), 1 << 10)
    (slice_group,) = [one for one in evaluator.slice_groups if "up.weight" in one.names]
    kept = key.slicing(slice_group, 4, None, ctx)
    assert kept.decisions == key.decisions
    assert key.slicing(slice_group, 4, 8, ctx) == kept  # all of both weights
    split = key.slicing(slice_group, 4, 5, ctx)
    decided = dict(zip((one.name for one in ctx.parameters), split.decisions, strict=True))
    # The backward reads the last weight first: that one is kept, and of the other one slice.
    assert decided["up.weight"] == Decision.SHARD_REGATHER
    assert decided["down.weight"] == decided["first.weight"] == Decision.SHARD_KEEP
    assert {one.name: one.kept_slices for one in split.splits} == {"up.weight": 1, "down.weight": 0}
    whole = split.slicing(slice_group, 1, None, ctx)
    replicated = kept.deciding(enumerate((Decision.REPLICATE,) * len(ctx.parameters)), ctx)
    for one, slices in (
        (kept, (4, 8)),
        (split, (4, 5)),
        (whole, (1, None)),
        (replicated, (4, None)),
    ):
        assert one.slices_of(slice_group, ctx) == slices
    assert split.deciding(enumerate(key.decisions), ctx) == kept
    again = key.slicing(slice_group, 4, 0, ctx)
    tight = PlanEvaluator(step, ctx.replace(limit_bytes=0), default_passes())
    whole = again.slicing(slice_group, 1, None, ctx)
    peaks = [tight.peak_bytes(one) for one in (again, split, kept, whole)]
    assert peaks[0] < peaks[1] <= peaks[2] and peaks[0] < peaks[3]
