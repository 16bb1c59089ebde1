"""Neighbours: what a change leaves alone, and which bucket sizes are next."""

from __future__ import annotations

import dataclasses

import torch

from passes.graph.metadata import PACKABLE
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.constants import CONSTANTS
from passes.plan.neighbours import Neighbourhood
from passes.plan.planner import make_plan
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.predict import predict
from tests.passes.candidates.test_move_groups import Layers
from tests.passes.capture.test_fold_layers import captured as captured_layers
from tests.passes.capture.test_fold_layers import folded
from tests.passes.captures import capture_step
from tests.passes.plan.test_planner import PASSES, captured, limits


def test_a_bucket_size_that_is_no_better_does_not_end_the_search_for_one(monkeypatch):
    captured_step, ctx = captured("even")
    start = bucket_bytes_for(ctx)
    real = predict

    def priced(captured_step, plan, ctx, passes):
        """Seconds by the buckets' size alone: twice it is worse, four times better."""
        step = real(captured_step, plan, ctx, passes)
        for gm in (step.forward, step.backward):  # what packs alike would not be priced again
            PACKABLE.pop(gm)
        seconds = {1: 2.0, 2: 3.0, 4: 1.0}.get(plan.bucket_bytes / start, 4.0)
        prediction = dataclasses.replace(step.prediction, step_seconds=seconds)
        return dataclasses.replace(step, prediction=prediction)

    monkeypatch.setattr("passes.pricing.evaluator.predict", priced)
    assert make_plan(captured_step, ctx, PASSES).bucket_bytes == 4 * start


def test_within_a_structure_only_decisions_and_buckets_change():
    step, ctx = captured("hourglass")
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=limits(step, ctx, 5)[1]), PASSES)
    best = evaluator.uniform(2)
    evaluator.evaluate(best)
    neighbours = Neighbourhood(evaluator)
    within = dict(neighbours.of(best, within=True)).values()
    assert within
    for key in within:
        assert (key.recompute, key.splits) == (best.recompute, best.splits)
    free = list(neighbours.of(best))
    assert len(free) == len({change for change, _ in free})
    assert any(key.splits for _, key in free) and any(key.recompute for _, key in free)


def test_neighbours_of_a_folded_step_promise_a_gain():
    _, ctx = captured_layers()
    evaluator = PlanEvaluator(folded(), ctx, PASSES)
    for option in range(3):
        best = evaluator.uniform(option)
        evaluator.evaluate(best)
        neighbours = Neighbourhood(evaluator)
        near = neighbours.prices.near(best)
        most_seconds = (1 - CONSTANTS.promise) * evaluator.seconds(best)
        for change, key in neighbours.of(best):
            is_open = isinstance(change, tuple) and change[0] == "bucket" and len(change) == 2
            assert is_open or near.judge(key).seconds < most_seconds


def test_tokens_in_other_numbers_of_chunks_are_neighbours():
    step, ctx = capture_step(Layers(), torch.randn(8, 16), world_size=2, tensor_parallel=True)
    evaluator = PlanEvaluator(step, ctx, PASSES)
    ((group, *_),) = evaluator.move_groups.by_weights
    weights = evaluator.uniform(2)
    evaluator.evaluate(weights)

    def chunks_of(best):
        changes = dict(Neighbourhood(evaluator).of(best))
        return [key.chunks_of(group) for (kind, *_), key in _named(changes) if kind == "chunks"]

    assert chunks_of(weights) == [2]
    whole = weights.moving(group, True, ctx)
    evaluator.evaluate(whole)
    assert chunks_of(whole) == [2, 4]
    halves = whole.moving(group, True, ctx, 2)
    evaluator.evaluate(halves)
    assert chunks_of(halves) == [4, 1]
    rows = evaluator.plan_of(halves)
    assert {row.name for row in rows.parameters if row.chunks == 2} == set(group.dims)


def _named(changes):
    return [(change, key) for change, key in changes.items() if isinstance(change, tuple)]
