"""Prices: a forecast from one simulation beside the simulation of the other candidate."""

from __future__ import annotations

import pytest

from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.prices import Prices
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
