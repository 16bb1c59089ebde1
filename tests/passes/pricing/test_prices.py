"""Prices: a forecast from one simulation beside the simulation of the other candidate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.prices import Prices
from passes.types.decision import Decision
from passes.types.hardware_presets import PRESETS
from tests.passes.captures import capture_step
from tests.passes.plan.test_planner import MODELS, PASSES, captured, limits


@pytest.mark.parametrize("model", MODELS)
def test_the_memory_of_other_decisions_is_forecast_within_a_few_percent(model: str):
    step, ctx = captured(model)
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=limits(step, ctx, 5)[2]), PASSES)
    reference = evaluator.uniform(2).replace(bucket_bytes=1)  # every collective by itself
    evaluator.evaluate(reference)
    near = Prices(evaluator).near(reference)
    compared = 0
    for index, options in enumerate(evaluator.choices):
        for option in options:
            key = reference.deciding([(index, option.decision)], ctx)
            found = evaluator.evaluate(key).bytes_at
            assert found is not None
            assert near.judge(key).peak_bytes == pytest.approx(int(found.max()), rel=0.05)
            compared += key != reference
    assert compared >= 2 * (len(evaluator.choices) - 1)


def test_a_candidate_judges_itself_as_it_is():
    step, ctx = captured("hourglass")
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=limits(step, ctx, 5)[1]), PASSES)
    prices = Prices(evaluator)
    for option in range(3):
        key = evaluator.uniform(option)
        found = evaluator.evaluate(key)
        forecast = prices.near(key).judge(key)
        assert found.bytes_at is not None
        assert forecast.peak_bytes == found.bytes_at.max()
        assert forecast.seconds == pytest.approx(found.prediction.step_seconds)


def test_recomputation_is_forecast_within_a_few_percent():
    step, ctx = captured("hourglass", rows=512)
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=limits(step, ctx, 5)[1]), PASSES)
    reference = evaluator.uniform(2).replace(bucket_bytes=1)
    evaluator.evaluate(reference)
    near = Prices(evaluator).near(reference)
    assert evaluator.sets
    for one in evaluator.sets:
        key = reference.recomputing(one)
        found = evaluator.evaluate(key).bytes_at
        assert found is not None
        assert near.judge(key).peak_bytes == pytest.approx(int(found.max()), rel=0.05)


class Rotary(nn.Module):
    """Saved tensors whose chain reads a product that nothing saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            h = self.first(x)
            h = h * torch.arange(512).cos() + h.flip(-1) * torch.arange(512).sin()
            x = x + self.last(h.sin())
        return x.square().mean()


def test_what_nothing_saves_is_recomputed_too():
    step, ctx = capture_step(Rotary(), torch.randn(512, 64))
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=1 << 21), PASSES)
    reference = evaluator.uniform(2).replace(bucket_bytes=1)
    compared = 0
    for one in evaluator.sets:
        recomputing = reference.recomputing(one)
        evaluator.evaluate(recomputing)
        near = Prices(evaluator).near(recomputing)
        for left_out in one.recompute:
            key = recomputing.replace(recompute=tuple(n for n in one.recompute if n != left_out))
            found = evaluator.evaluate(key)
            assert found.bytes_at is not None
            forecast = near.judge(key)
            assert forecast.peak_bytes == pytest.approx(int(found.bytes_at.max()), rel=0.05)
            assert forecast.seconds == pytest.approx(found.prediction.step_seconds, rel=0.01)
            compared += 1
    assert compared >= 3


class Looking(nn.Module):
    """Rows of a table, which the backward needs only if it recomputes them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 64)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.down(self.up(self.table(words)).relu()).square().mean()


def looking(limit_bytes: int | None) -> tuple[PlanEvaluator, int]:
    """An evaluator, and the index of the table."""
    words = torch.randint(0, 4096, (512,))
    step, ctx = capture_step(Looking(), words, hardware=PRESETS["cpu-gloo"])
    names = [one.name for one in ctx.parameters]
    limited = ctx.replace(limit_bytes=limit_bytes)
    return PlanEvaluator(step, limited, PASSES), names.index("table.weight")


def test_a_kept_weight_that_the_backward_recomputes_from_is_there_until_then():
    evaluator, table = looking(1 << 40)
    evaluator.is_short = True
    reference = evaluator.uniform(2).replace(bucket_bytes=1, recompute=("table:embedding:0",))
    evaluator.evaluate(reference)
    near = Prices(evaluator).near(reference)
    key = reference.deciding([(table, Decision.SHARD_KEEP)], evaluator.ctx)
    found = evaluator.evaluate(key).bytes_at
    assert found is not None and near.fixed is not None
    forecast = near.unchosen(key) + Prices(evaluator).footprints.bytes_of(key)
    forward, backward = evaluator.place_of
    for place in (len(forward) - 1, len(forward) + backward["mm_3"]):
        assert forecast[place] == found[place]


def test_a_weight_that_the_backward_does_not_read_is_not_gathered_again():
    evaluator, table = looking(None)
    kept, again = evaluator.uniform(1), evaluator.uniform(1)
    again = again.deciding([(table, Decision.SHARD_REGATHER)], evaluator.ctx)
    evaluator.evaluate(kept)
    forecast = Prices(evaluator).near(kept).judge(again)
    assert evaluator.evaluate(again).prediction.step_seconds == evaluator.seconds(kept)
    assert forecast.seconds == pytest.approx(evaluator.seconds(kept), rel=1e-9)
