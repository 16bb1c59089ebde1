"""Explain: the reason of every decision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.graph.captured import Captured
from passes.plan.planner import make_plan
from passes.pricing.predict import predict
from passes.types.context import Context
from passes.types.decision import Decision
from tests.passes.captures import capture_step
from tests.passes.plan.test_planner import PASSES, captured, every_plan, limits


def test_what_cannot_be_cut_is_replicated_and_says_so():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    step, ctx = capture_step(model, torch.randn(16, 64))
    least, most = uniform_decided(step, ctx)
    plan = make_plan(step, ctx.replace(limit_bytes=(least + most) // 2), PASSES)
    for name in ("2.weight", "2.bias"):  # of one row
        assert plan[name].decision == Decision.REPLICATE
        assert "too small to shard" in plan[name].reason


def uniform_decided(step: Captured, ctx: Context) -> tuple[int, int]:
    """Least and most of what all plans take."""
    peaks = [predict(step, p, ctx, PASSES).prediction.peak_bytes for p in every_plan(ctx)]
    return min(peaks), max(peaks)


@pytest.mark.usefixtures("short_search")
def test_every_row_says_what_its_decision_saves_and_why():
    step, ctx = captured("even")
    plan = make_plan(step, ctx.replace(limit_bytes=limits(step, ctx, 9)[1]), PASSES)
    assert any(row.decision.sharded for row in plan.parameters)
    for row in plan.parameters:
        # Parameter, gradient and Adam's two moments of 64 x 64 floats; three quarters go away.
        assert row.saved_bytes == (3 * 4 * 64 * 64 * 4 // 4 if row.decision.sharded else 0)
        assert ("gather" in row.reason) == row.decision.sharded
        assert "reduce" in row.reason
