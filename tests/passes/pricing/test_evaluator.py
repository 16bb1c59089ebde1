"""The plan evaluator: what need not be evaluated again, and what a simulation says by place."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx, nn

from passes.candidates.candidate import Candidate
from passes.pipeline import default_passes
from passes.pricing.evaluator import PlanEvaluator
from passes.types.decision import Decision
from tests.passes.capture.test_fold_layers import captured, folded
from tests.passes.captures import capture_step

SIZES = [1 << exponent for exponent in range(6, 20)]


@pytest.mark.parametrize("decision", [Decision.REPLICATE, Decision.SHARD_REGATHER])
def test_sizes_that_pack_alike_cost_the_same(decision: Decision) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 96), nn.Linear(96, 8))
    captured, ctx = capture_step(model, torch.randn(16, 64))
    decisions = (decision,) * len(ctx.parameters)
    found = {}
    for size in SIZES:  # each by an evaluator that knows no other size
        evaluator = PlanEvaluator(captured, ctx, default_passes())
        found[size] = evaluator.evaluate(Candidate(decisions, size))
    evaluator = PlanEvaluator(captured, ctx, default_passes())
    left = evaluator.left
    for size in SIZES:
        assert evaluator.evaluate(Candidate(decisions, size)).prediction == found[size].prediction
    orders = {str(found[size].plan.order) for size in SIZES}
    assert 1 < len(orders) < len(SIZES)
    assert left - evaluator.left == len(orders)


def test_the_next_sizes_pack_otherwise() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    captured, ctx = capture_step(model, torch.randn(16, 64))
    evaluator = PlanEvaluator(captured, ctx, default_passes())
    key = Candidate((Decision.SHARD_KEEP,) * len(ctx.parameters), 1 << 15)
    evaluator.evaluate(key)
    sizes = evaluator.other_sizes(key)
    assert sizes and all(size != key.bucket_bytes for size in sizes)
    for size in sizes:
        other = evaluator.evaluate(key.replace(bucket_bytes=size))
        assert other.plan.order != evaluator.seen[key].plan.order


def test_bytes_by_place_are_those_of_the_simulator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 16))
    captured, ctx = capture_step(model, torch.randn(16, 64))
    ctx = ctx.replace(limit_bytes=0)  # no overlap
    evaluator = PlanEvaluator(captured, ctx, default_passes())
    for option in range(3):
        found = evaluator.evaluate(evaluator.uniform(option))
        assert found.bytes_at is not None
        assert found.bytes_at.max() == found.prediction.peak_bytes
        assert len(found.bytes_at) == len(found.seconds_at)


def test_evaluations_of_a_folded_step_do_not_keep_its_graphs() -> None:
    """Only the best candidate's. The planner turns garbage collection off; graphs are cycles."""
    evaluator = PlanEvaluator(folded(), captured()[1], default_passes())
    alive = []
    gc.collect()
    gc.disable()
    try:
        for size in SIZES[:6]:
            evaluator.evaluate(evaluator.uniform(1).replace(bucket_bytes=size))
            alive.append(sum(type(one) is fx.Graph for one in gc.get_objects()))
    finally:
        gc.enable()
    assert evaluator._priced > 2
    assert alive[-1] <= alive[0] + 2, alive  # a forward and a backward
