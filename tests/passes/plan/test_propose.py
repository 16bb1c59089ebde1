"""Propose: memory budgets until a plan fits."""

from __future__ import annotations

from types import SimpleNamespace

from torch import fx

from passes.candidates.recompute_sets import RecomputeSet
from passes.capture.captured_step import Captured
from passes.plan.planner import make_plan
from passes.types.decision import Decision
from tests.passes.graphs import context, parameter
from tests.passes.plan.test_planner import NETWORKS, PASSES, network


def test_a_set_to_recompute_that_fits_between_sets_that_do_not_is_found(monkeypatch):
    # Peaks do not fall from set to set: the second and the last fit, and the second is faster.
    limit_bytes, fitting = 1_000_000, {("1",): 1.0, ("4",): 5.0}
    empty = fx.GraphModule({}, fx.Graph())

    def predicted(captured, plan, ctx, passes):
        fits = plan.recompute in fitting
        found = SimpleNamespace(
            peak_bytes=limit_bytes - 1 if fits else 2 * limit_bytes,
            step_seconds=fitting.get(plan.recompute, 0.5),
            peak={},
        )
        return SimpleNamespace(prediction=found, forward=empty, backward=empty, simulations=())

    sets = [RecomputeSet((str(index),), (), 0, 0.0) for index in range(5)]
    monkeypatch.setattr("passes.plan.evaluator.predict", predicted)
    monkeypatch.setattr("passes.plan.evaluator.recompute_sets", lambda *_: sets)
    many = SimpleNamespace(graph=SimpleNamespace(nodes=range(20_000)))  # refining would take long
    parameters = [parameter("weight", (128, 64))]
    ctx = context(parameters, limit_bytes=limit_bytes, hardware=network(NETWORKS["slow"]))
    ctx = ctx.replace(slices=())  # there is no graph to find any in
    plan = make_plan(Captured(many, many), ctx, PASSES)
    assert plan.recompute == ("1",)


def test_a_peak_that_hardly_falls_with_the_budget_does_not_end_the_search(monkeypatch):
    # Of twelve weights five must be gathered again; until then the peak is one byte too much.
    limit_bytes, least_again = 2_000_000, 5
    empty = fx.GraphModule({}, fx.Graph())

    def predicted(captured, plan, ctx, passes):
        again = [row.decision for row in plan.parameters].count(Decision.SHARD_REGATHER)
        peak_bytes = limit_bytes + (1 if again < least_again else -again)
        found = SimpleNamespace(peak_bytes=peak_bytes, step_seconds=1.0 + again, peak={})
        return SimpleNamespace(prediction=found, forward=empty, backward=empty, simulations=())

    monkeypatch.setattr("passes.plan.evaluator.predict", predicted)
    monkeypatch.setattr("passes.plan.evaluator.recompute_sets", lambda *_: [])
    many = SimpleNamespace(graph=SimpleNamespace(nodes=range(20_000)))  # refining would take long
    parameters = [parameter(f"layer{i}.weight", (128, 64)) for i in range(12)]
    ctx = context(parameters, limit_bytes=limit_bytes, hardware=network(NETWORKS["slow"]))
    ctx = ctx.replace(slices=())  # there is no graph to find any in
    plan = make_plan(Captured(many, many), ctx, PASSES)
    again = [row.decision for row in plan.parameters].count(Decision.SHARD_REGATHER)
    assert least_again <= again <= least_again + 2
