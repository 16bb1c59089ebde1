"""Gains: the figures in a row's reason are those of the plans with the other decision."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from passes.pipeline import default_passes
from passes.plan.planner import Infeasible, complete, make_plan
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.prices import Prices
from passes.reasons.gains import _gain, gains
from passes.types.decision import Decision
from passes.types.units import format_bytes
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import Mlp

MIB, MS = 1 << 20, 1e-3
NOW_BYTES, NOW_SECONDS = 100 * MIB, 50 * MS


@pytest.mark.parametrize(
    ("peak_bytes", "seconds", "said"),
    [
        (112 * MIB, 49.6 * MS, "saves 12.00 MiB at the peak for 400 us"),
        (88 * MIB, 50.4 * MS, "saves 400 us for 12.00 MiB at the peak"),
        (112 * MIB, 50.4 * MS, "saves 12.00 MiB at the peak and 400 us against shard, keep"),
        (100 * MIB, 50.4 * MS, "saves 400 us against shard, keep"),
        (88 * MIB, 50 * MS, "as fast as shard, keep"),
        (88 * MIB, 49 * MS, ""),
    ],
)
def test_bytes_and_seconds_against_another_decision(peak_bytes, seconds, said):
    assert _gain(seconds - NOW_SECONDS, peak_bytes - NOW_BYTES, "shard, keep") == said


def test_a_regathered_weight_saves_what_keeping_it_takes():
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    step, ctx = capture_step(model, torch.randn(64, 256))
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=3 << 20), default_passes())
    key = evaluator.uniform(2)  # all regathered
    evaluator.evaluate(key)
    found = gains(evaluator, Prices(evaluator).near(key))
    assert [*found] == [one.name for one in ctx.parameters]
    kept = evaluator.uniform(1)  # four alike weights: one group
    bytes_at = [evaluator.evaluate(one).bytes_at for one in (kept, key)]
    assert all(one is not None for one in bytes_at)
    saved_bytes = int(bytes_at[0].max() - bytes_at[1].max())
    assert saved_bytes > 0
    assert found["0.weight"].startswith(f"saves {format_bytes(saved_bytes)} at the peak for ")


def test_alike_parameters_have_the_gain_of_their_group():
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)], nn.Linear(64, 2))
    step, ctx = capture_step(model, torch.randn(16, 64))
    evaluator = PlanEvaluator(step, ctx, default_passes())
    key = evaluator.uniform(1).deciding([(0, Decision.REPLICATE)], ctx)
    evaluator.evaluate(key)
    found = gains(evaluator, Prices(evaluator).near(key))
    assert found["1.weight"] == found["2.weight"] == found["3.weight"] != found["0.weight"]
    assert "4.bias" not in found  # too small to shard: no other decision is possible


@pytest.mark.thorough
def test_slices_save_what_whole_operators_take():
    torch.manual_seed(0)
    step, ctx = capture_step(Mlp(1024, bias=False), torch.randn(3, 6), world_size=8)
    passes = default_passes()
    with pytest.raises(Infeasible) as error:
        make_plan(step, ctx.replace(limit_bytes=1), passes)
    limited = ctx.replace(limit_bytes=error.value.least_bytes)
    plan = make_plan(step, limited, passes)
    assert plan["up.weight"].slices > 1
    rows = [dataclasses.replace(row, slices=1, kept_slices=0, like=None) for row in plan.parameters]
    whole = complete(plan.replace(parameters=tuple(rows), order={}), step, limited, passes)
    saved_bytes = whole.prediction.peak_bytes - plan.prediction.peak_bytes
    reason = plan["up.weight"].reason
    said = re.search(r"slices: saves ([\d.]+) KiB at the peak (for|and) ", reason)
    assert said, reason
    assert float(said[1]) * 1024 == pytest.approx(saved_bytes, rel=0.2)
    assert said[0] in plan["down.weight"].reason
