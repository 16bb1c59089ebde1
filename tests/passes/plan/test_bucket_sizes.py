"""Bucket sizes: the search for them."""

from __future__ import annotations

import dataclasses

from passes.graph.metadata import PACKABLE
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.planner import make_plan
from passes.plan.predict import predict
from tests.passes.plan.test_planner import PASSES, captured


def test_a_bucket_size_that_is_no_better_does_not_end_the_search_for_one(monkeypatch):
    captured_step, ctx = captured("even")
    start = bucket_bytes_for(ctx)
    looked_at = []
    real = predict

    def priced(captured_step, plan, ctx, passes):
        """Seconds by the buckets' size alone: four times it is worse, sixteen times better."""
        step = real(captured_step, plan, ctx, passes)
        for gm in (step.forward, step.backward):  # what packs alike would not be priced again
            PACKABLE.pop(gm)
        looked_at.append(plan.bucket_bytes // start)
        seconds = {1: 2.0, 4: 3.0, 16: 1.0}.get(plan.bucket_bytes / start, 4.0)
        prediction = dataclasses.replace(step.prediction, step_seconds=seconds)
        return dataclasses.replace(step, prediction=prediction)

    monkeypatch.setattr("passes.plan.evaluator.predict", priced)
    assert make_plan(captured_step, ctx, PASSES).bucket_bytes == 16 * start
    assert max(looked_at) == 16 * 16  # two in a row that are no better end it
