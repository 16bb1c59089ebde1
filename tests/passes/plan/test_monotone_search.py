"""The ladder: more memory never gives a slower step, and no rung is searched under twice."""

from __future__ import annotations

import itertools

import pytest

from passes.pipeline import default_passes
from passes.plan import monotone_search as ladder_of
from passes.plan.monotone_search import MonotoneSearch
from passes.plan.planner import Infeasible, make_plan
from passes.types.plan import Plan, Prediction
from tests.passes.plan.test_planner import captured, peak_of, seconds_of


def said(step_seconds: float, peak_bytes: int) -> Prediction:
    return Prediction(step_seconds, 0.1, 0.0, peak_bytes, {"parameters": peak_bytes})


def test_a_search_that_goes_astray_does_not_count(monkeypatch):
    """Where the search under 66 finds a slower plan than under 64, the latter stands."""
    steps = {60: 3.0, 62: 2.9, 63: 2.0, 64: 2.0, 66: 2.5, 68: 1.9, None: 1.5}
    asked = []

    def make(step, ctx, passes, say=None) -> Plan:
        asked.append(ctx.limit_bytes)
        seconds = steps.get(ctx.limit_bytes, 2.95)
        prediction = said(seconds, ctx.limit_bytes or 100)
        return Plan((), 2, memory_limit_bytes=ctx.limit_bytes, prediction=prediction)

    monkeypatch.setattr(ladder_of, "make_plan", make)
    monkeypatch.setattr(ladder_of, "least_limit", lambda *given: said(0.0, 60))
    step, ctx = captured("even")
    heard: list[str] = []
    monotone_search = MonotoneSearch(step, ctx, default_passes(), heard.append)
    assert monotone_search.rungs(67) == [60, 61, 62, 63, 64, 66]
    found = [monotone_search.plan(limit) for limit in range(60, 70)]
    assert [seconds_of(plan) for plan in found] == [3, 2.95, 2.9, 2, 2, 2, 2, 2, 1.9, 1.9]
    assert [plan.memory_limit_bytes for plan in found] == [60, 61, 62, 63, 63, 63, 63, 63, 68, 68]
    assert asked == [None, 60, 61, 62, 63, 64, 66, 68]
    assert heard[-2:] == ["searching under 68 B, 7 of 7", "69 B counts as 68 B"]
    assert monotone_search.rungs(1 << 20)[-1] == 100, (
        "more than is taken without a limit is of no use"
    )


@pytest.mark.parametrize("gib", [8, 11, 16, 24, 40, 46, 48, 80, 94, 140, 192])
def test_limits_that_people_give_are_rungs(gib, monkeypatch):
    monkeypatch.setattr(ladder_of, "least_limit", lambda *given: said(0.0, 7 * 2**30 + 12345))
    monkeypatch.setattr(MonotoneSearch, "free", Plan((), 2, prediction=said(1.0, 1 << 40)))
    step, ctx = captured("even")
    rungs = MonotoneSearch(step, ctx, default_passes()).rungs(gib << 30)
    assert rungs[-1] == gib << 30
    assert all(low < high <= 1.04 * low for low, high in itertools.pairwise(rungs))


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
def test_more_memory_is_never_slower_and_no_plan_is_above_its_limit():
    step, ctx = captured("hourglass", "slow")
    passes = default_passes()
    monotone_search = MonotoneSearch(step, ctx, passes)
    least = monotone_search.least.peak_bytes
    found = [
        (limit, monotone_search.plan(limit)) for limit in range(least, least + least // 20, 1777)
    ]
    assert len({plan.memory_limit_bytes for _, plan in found}) > 1
    for limit, plan in found:
        assert plan.memory_limit_bytes is not None
        assert peak_of(plan) <= plan.memory_limit_bytes <= limit
    assert all(seconds_of(b) <= seconds_of(a) for (_, a), (_, b) in itertools.pairwise(found))
    highest = monotone_search.rungs(found[-1][0])[-1]
    own = make_plan(step, ctx.replace(limit_bytes=highest), passes)
    assert seconds_of(found[-1][1]) <= seconds_of(own)


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
def test_the_least_limit_is_that_of_the_quick_search():
    step, ctx = captured("hourglass", "slow")
    with pytest.raises(Infeasible) as quick:
        make_plan(step, ctx.replace(limit_bytes=1), default_passes())
    monotone_search = MonotoneSearch(step, ctx, default_passes())
    with pytest.raises(Infeasible) as thorough:
        monotone_search.plan(monotone_search.least.peak_bytes - 1)
    assert thorough.value.least_bytes == quick.value.least_bytes
