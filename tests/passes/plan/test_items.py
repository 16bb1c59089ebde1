"""Items: alike parameters have a decision for the first and one for the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from passes.capture.fold_layers import fold
from passes.pipeline import default_passes
from passes.plan.constants import CONSTANTS
from passes.plan.items import items_of, tiny_ones
from passes.plan.planner import make_plan
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.predict import predict
from passes.types.decision import DECISIONS
from tests.passes.capture.test_fold_layers import (
    LAYERS,
    NETWORKS,
    PASSES,
    captured,
    folded,
    least_bytes,
    network,
)
from tests.passes.captures import capture_step


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
def test_a_plan_of_a_folded_step_is_near_that_of_the_whole(monkeypatch):
    """And between plans for all layers alike there are some for which others fit."""
    # Of a folded step nothing runs in slices; recomputing has tests of its own.
    monkeypatch.setattr("passes.pricing.evaluator.PlanEvaluator.sets", [])
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


def stack() -> PlanEvaluator:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(5)], nn.Linear(256, 8))
    captured_step, ctx = capture_step(model, torch.randn(16, 256))
    return PlanEvaluator(captured_step, ctx, default_passes())


def test_every_parameter_is_in_one_item_and_the_tiny_ones_share_one():
    evaluator = stack()
    items = items_of(evaluator)
    members = [index for item in items for index in item.members]
    assert sorted(members) == list(range(len(evaluator.ctx.parameters)))
    names = [one.name for one in evaluator.ctx.parameters]
    tiny = tiny_ones(evaluator)
    assert tiny and all(names[index].endswith("bias") for index in tiny)
    (own,) = [item for item in items if tiny & {*item.members}]
    assert {*own.members} == tiny
    assert all(first == others for first, others, _ in own.options)


def test_all_or_none_of_a_group_of_alike_parameters_are_tiny():
    """Two of the five weights are below the share, but not the five."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(5)])
    model.append(nn.Linear(32, 8000, bias=False))
    captured_step, ctx = capture_step(model, torch.randn(16, 32))
    evaluator = PlanEvaluator(captured_step, ctx, default_passes())
    full_bytes = [one.full_bytes for one in ctx.parameters]
    share_bytes = CONSTANTS.tiny * sum(full_bytes)
    assert 2 * full_bytes[0] < share_bytes < 5 * full_bytes[0]
    assert not tiny_ones(evaluator)


def test_an_item_has_one_parameter_of_every_layer_of_a_folded_step():
    """Also if two of a layer are alike."""
    blocks = [
        nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
        for _ in range(LAYERS)
    ]
    captured_step, ctx = capture_step(nn.Sequential(*blocks), torch.randn(16, 64), world_size=8)
    few = fold(captured_step, ctx.parameters)
    assert few is not None
    items = items_of(PlanEvaluator(few, ctx, PASSES))
    names = [[ctx.parameters[index].name for index in item.members] for item in items]
    assert names == [[f"{n}.{place}.weight" for n in range(LAYERS)] for place in (0, 2)]


def test_an_option_costs_what_its_changes_cost():
    evaluator = stack()
    draw = np.random.default_rng(0)
    table = draw.random((len(evaluator.ctx.parameters), len(DECISIONS)))
    for item in items_of(evaluator):
        sums = item.sums(table)
        for option in range(len(item.options)):
            changes = item.changes(option)
            assert [index for index, _ in changes] == list(item.members)
            expected = sum(table[index, DECISIONS.index(one)] for index, one in changes)
            assert sums[option] == pytest.approx(expected)
