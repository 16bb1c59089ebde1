"""Refine: after it no single change that fits is faster."""

from __future__ import annotations

import pytest

from passes.plan.evaluator import PlanEvaluator
from passes.plan.propose import look_at_uniform
from passes.plan.refine import look_at_all, refine
from tests.passes.plan.test_planner import PASSES, captured, limits


def evaluated(model: str, monkeypatch: pytest.MonkeyPatch) -> PlanEvaluator:
    """An evaluator of a limited step that has seen the uniform plans; nothing is recomputed."""
    monkeypatch.setattr("passes.plan.evaluator.recompute_sets", lambda *_: [])
    step, ctx = captured(model)
    limited = ctx.replace(limit_bytes=limits(step, ctx, 5)[2], slices=(), deciding=True)
    evaluator = PlanEvaluator(step, limited, PASSES)
    look_at_uniform(evaluator)
    return evaluator


@pytest.mark.parametrize("model", ["even", "biased"])
def test_no_single_change_that_fits_is_faster(model: str, monkeypatch: pytest.MonkeyPatch):
    evaluator = evaluated(model, monkeypatch)
    _, before_seconds = evaluator.fastest()
    refine(evaluator)
    best, seconds = evaluator.fastest()
    assert seconds < before_seconds
    assert evaluator.left > 0, "the budget ended the search, not its goal"
    for members, options in zip(evaluator.tied, evaluator.tied_choices, strict=True):
        for option in options:
            changed = list(best.decisions)
            for index in members:
                changed[index] = option.decision
            found = evaluator.evaluate(evaluator.deciding(best, changed))
            assert not evaluator.fits(found) or found.step_seconds >= seconds


def test_all_plans_of_a_small_step_are_evaluated(monkeypatch: pytest.MonkeyPatch):
    evaluator = evaluated("even", monkeypatch)
    refine(evaluator)
    _, refined_seconds = evaluator.fastest()
    look_at_all(evaluator)
    _, seconds = evaluator.fastest()
    assert seconds <= refined_seconds
    combinations = {key.decisions for key in evaluator.seen}
    assert len(combinations) == 3**3  # three weights, three decisions each
