"""The plan evaluator: what need not be priced again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from passes.pipeline import default_passes
from passes.plan.evaluator import Candidate, PlanEvaluator
from passes.types.decision import Decision
from tests.passes.captures import capture_step

SIZES = [1 << exponent for exponent in range(6, 20)]


@pytest.mark.parametrize("decision", [Decision.REPLICATE, Decision.SHARD_REGATHER])
def test_sizes_that_pack_alike_cost_the_same(decision: Decision) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 96), nn.Linear(96, 8))
    captured, ctx = capture_step(model, torch.randn(16, 64))
    evaluator = PlanEvaluator(captured, ctx, default_passes())
    key = Candidate((decision,) * len(ctx.parameters))
    priced = {size: evaluator.price(key, ctx, size) for size in SIZES}
    alike = 0
    for one, other in itertools.combinations(SIZES, 2):
        same_order = priced[one][0].order == priced[other][0].order
        assert evaluator.packs_alike(key, one, other) == same_order
        if same_order:
            alike += 1
            assert priced[one][1] == priced[other][1]
    assert 0 < alike < len(SIZES) * (len(SIZES) - 1) // 2


def test_a_size_that_packs_alike_is_not_priced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, ctx = capture_step(nn.Linear(64, 64, bias=False), torch.randn(16, 64))
    evaluator = PlanEvaluator(captured, ctx, default_passes())
    key = Candidate((Decision.SHARD_KEEP,))
    evaluator.evaluate(key)
    monkeypatch.setattr(evaluator, "price", lambda *_: pytest.fail("priced again"))
    assert not evaluator.with_buckets(key, 1 << 12)
    assert 1 << 12 in evaluator.sizes[key]
