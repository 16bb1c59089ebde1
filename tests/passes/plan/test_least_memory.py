"""The least memory: the smallest limit with a plan."""

from __future__ import annotations

import pytest

from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.planner import Infeasible, complete, make_plan
from tests.passes.plan.test_planner import MODELS, PASSES, captured, every_plan, peak_of


@pytest.mark.parametrize("model", MODELS)
def test_an_infeasible_limit_says_the_least_and_that_works(model: str):
    step, ctx = captured(model)
    with pytest.raises(Infeasible, match="is below the least possible") as caught:
        make_plan(step, ctx.replace(limit_bytes=1000), PASSES)
    least = caught.value.least_bytes
    assert peak_of(make_plan(step, ctx.replace(limit_bytes=least), PASSES)) <= least


@pytest.mark.parametrize("model", MODELS)
def test_the_least_limit_is_about_that_of_the_smallest_of_all_plans(model: str, monkeypatch):
    step, ctx = captured(model)
    # Those plans run nothing in slices, and recompute nothing.
    tight = ctx.replace(limit_bytes=1000, slices=())
    monkeypatch.setattr("passes.plan.evaluator.recompute_sets", lambda *_: [])
    with pytest.raises(Infeasible) as caught:
        make_plan(step, tight, PASSES)
    start = bucket_bytes_for(tight)
    sizes = [size for size in (start, start // 4, start // 16, start // 64) if size >= 1 << 10]
    peaks = [
        peak_of(complete(one.replace(bucket_bytes=size), step, tight, PASSES))
        for one in every_plan(tight)
        for size in sizes
    ]
    assert min(peaks) <= caught.value.least_bytes <= 1.05 * min(peaks)
