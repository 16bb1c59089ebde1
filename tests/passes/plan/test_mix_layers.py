"""Mix layers: the plan of a folded step gives its layers different decisions."""

from __future__ import annotations

import pytest

from passes.plan.planner import make_plan
from passes.plan.predict import predict
from tests.passes.capture.test_fold_layers import (
    LAYERS,
    NETWORKS,
    PASSES,
    captured,
    folded,
    least_bytes,
    network,
)


def test_a_plan_of_a_folded_step_is_near_that_of_the_whole(monkeypatch):
    """And between plans for all layers alike there are some for which others fit."""
    # Of a folded step nothing runs in slices; recomputing has tests of its own.
    monkeypatch.setattr("passes.plan.evaluator.recompute_sets", lambda *_: [])
    step, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS["slow"]), slices=())
    free = make_plan(folded(), ctx, PASSES)
    assert free.order == {}
    least = least_bytes(ctx)
    mixed = 0
    for share in (0.3, 0.8):
        limit_bytes = int(least + share * (free.prediction.peak_bytes - least))
        limited = ctx.replace(limit_bytes=limit_bytes)
        few = make_plan(folded(), limited, PASSES)
        assert [row.name for row in few.parameters] == [one.name for one in ctx.parameters]
        assert few.prediction.peak_bytes <= limit_bytes
        mixed += len({few.decision(f"blocks.{i}.up.weight") for i in range(LAYERS)}) > 1
        there = predict(step, few, limited.replace(deciding=True), PASSES).prediction
        assert there.peak_bytes <= 1.05 * limit_bytes
        assert there.step_seconds == pytest.approx(few.prediction.step_seconds, rel=0.05)
    best = make_plan(step, limited, PASSES)
    assert there.step_seconds <= 1.06 * best.prediction.step_seconds
    assert mixed
