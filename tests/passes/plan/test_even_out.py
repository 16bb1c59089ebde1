"""Even out: alike parameters differ only if this gains enough or if it is needed to fit."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

from passes.candidates.parameter_groups import alike
from passes.graph.captured import Captured
from passes.plan.constants import CONSTANTS
from passes.plan.even_out import evened
from passes.plan.items import items_of
from passes.plan.planner import complete, make_plan
from passes.pricing.evaluator import Finished, PlanEvaluator
from passes.pricing.prices import Prices
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.hardware_presets import PRESETS
from tests.passes.capture.test_fold_layers import (
    NETWORKS,
    PASSES,
    captured,
    least_bytes,
    network,
)
from tests.passes.captures import capture_step

LAYERS = 6


@functools.cache
def stack() -> tuple[Captured, Context]:
    """Six alike layers whose collectives are hidden but for the last ones."""
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128, bias=False) for _ in range(LAYERS)]
    return capture_step(nn.Sequential(*layers), torch.randn(512, 128))


def evened_from(ctx: Context, decisions: list[Decision]) -> tuple[Finished, Finished]:
    """A plan by hand and what is left of it."""
    step, _ = stack()
    evaluator = PlanEvaluator(step, ctx, PASSES)
    key = evaluator.uniform(1).deciding(enumerate(decisions), ctx)

    evaluator.evaluate(key)
    before, items = evaluator.ordered(evaluator.lowered(key)), items_of(evaluator)
    return before, evened(evaluator, items, Prices(evaluator), before)


def test_a_difference_that_gains_nothing_goes():
    _, ctx = stack()
    odd = [Decision.SHARD_KEEP] * LAYERS
    odd[2] = Decision.SHARD_REGATHER
    fast = ctx.replace(hardware=network(NETWORKS["fast"] / 100))
    before, after = evened_from(fast, odd)
    assert set(after.key.decisions) == {Decision.SHARD_KEEP}
    most_seconds = (1 + CONSTANTS.alike) * before.prediction.step_seconds
    assert after.prediction.step_seconds <= most_seconds


@pytest.mark.thorough
def test_a_difference_that_stays_gains_enough_or_is_needed_to_fit(monkeypatch):
    monkeypatch.setattr("passes.pricing.evaluator.PlanEvaluator.sets", [])
    step, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS["slow"]), slices=())
    least, free = least_bytes(ctx), make_plan(step, ctx, PASSES).prediction.peak_bytes
    limited = ctx.replace(limit_bytes=(least + free) // 2)
    plan = make_plan(step, limited, PASSES)
    mixed = 0
    for members in alike(ctx.parameters):
        names = {ctx.parameters[index].name for index in members}
        kinds = {plan.decision(name) for name in names}
        mixed += len(kinds) > 1
        for decision in kinds if len(kinds) > 1 else ():
            rows = [
                dataclasses.replace(row, decision=decision) if row.name in names else row
                for row in plan.parameters
            ]
            other = plan.replace(parameters=tuple(rows), order={})
            found = complete(other, step, limited, PASSES).prediction
            most_seconds = (1 + CONSTANTS.alike) * plan.prediction.step_seconds
            assert found.peak_bytes > limited.limit_bytes or found.step_seconds > most_seconds
    assert mixed


@pytest.mark.parametrize(("share", "stay"), [(1.0, False), (0.0, True)])
def test_slices_stay_if_they_gain_enough(share: float, stay: bool, monkeypatch):
    """Of all that they gain, or of nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048, False), nn.ReLU(), nn.Linear(2048, 512, False))
    hardware = PRESETS["cpu-gloo"]
    step, ctx = capture_step(model, torch.randn(128, 512), world_size=4, hardware=hardware)
    evaluator = PlanEvaluator(step, ctx, PASSES)
    whole = evaluator.uniform(1).replace(bucket_bytes=1 << 11)
    (group,) = evaluator.slice_groups
    key = whole.slicing(group, 4, None, ctx)
    evaluator.evaluate(whole)
    evaluator.evaluate(key)
    gained = evaluator.seconds(whole) / evaluator.seconds(key) - 1
    assert gained > 0.01
    constants = dataclasses.replace(CONSTANTS, sliced=1.01 * share * gained)
    monkeypatch.setattr("passes.plan.even_out.CONSTANTS", constants)
    before = evaluator.lowered(key)
    after = evened(evaluator, items_of(evaluator), Prices(evaluator), before)
    assert bool(after.key.splits) is stay


def test_scattered_differences_become_one():
    """As many layers as before have each decision, the first ones and the others."""
    _, ctx = stack()
    slow = ctx.replace(hardware=network(NETWORKS["slow"]))
    scattered = [(Decision.REPLICATE, Decision.SHARD_KEEP)[n % 2] for n in range(LAYERS)]
    before, _ = evened_from(slow, scattered)
    limited = slow.replace(limit_bytes=before.prediction.peak_bytes)
    before, after = evened_from(limited, scattered)
    decisions = after.key.decisions
    changes = sum(one != other for one, other in itertools.pairwise(decisions))
    assert changes <= 1
    assert after.prediction.step_seconds <= (1 + CONSTANTS.alike) * before.prediction.step_seconds
