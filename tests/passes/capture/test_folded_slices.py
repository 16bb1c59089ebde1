"""Folded slices: a folded step in slices costs what the whole one does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from passes.candidates.slice_groups import SliceGroup
from passes.capture.fold_layers import Folded, fold
from passes.graph.captured import Captured
from passes.plan.neighbours import Neighbourhood
from passes.plan.planner import complete, least_limit, make_plan
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.predict import LoweredStep, predict
from passes.types.context import Context
from passes.types.plan import Plan
from tests.passes.capture.test_fold_layers import (
    LAYERS,
    NETWORKS,
    PASSES,
    WIDTH,
    WORLD,
    Block,
    network,
)
from tests.passes.captures import capture_step

VOCABULARY, TOKENS = 4096, 64


class Words(nn.Module):
    """A table of many words before the layers, and a head after them."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 4 * WIDTH) for _ in range(LAYERS)])
        self.last = nn.Linear(WIDTH, heads, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.scale)
        return self.last(x).logsumexp(-1).mean()


@functools.cache
def captured(heads: int = WIDTH) -> tuple[Captured, Folded, Context]:
    torch.manual_seed(0)
    step, ctx = capture_step(Words(heads), torch.arange(TOKENS), world_size=WORLD)
    ctx = ctx.replace(hardware=network(NETWORKS["even"]), limit_bytes=0)
    folded = fold(step, ctx.parameters)
    assert folded is not None
    return step, folded, ctx


@functools.cache
def evaluator(heads: int = WIDTH) -> PlanEvaluator:
    _, folded, ctx = captured(heads)
    return PlanEvaluator(folded, ctx, PASSES)


def group_of(name: str, along: int, found: PlanEvaluator) -> SliceGroup:
    return next(one for one in found.slice_groups if one.layers[0].along[0][:2] == (name, along))


def both(plan: Plan, ctx: Context, heads: int = WIDTH) -> tuple[LoweredStep, LoweredStep]:
    """The whole step's prediction and the folded one's."""
    step, folded, _ = captured(heads)
    ctx = ctx.replace(deciding=True)
    return predict(step, plan, ctx, PASSES), predict(folded, plan, ctx, PASSES)


@pytest.mark.thorough
@pytest.mark.parametrize("recomputes", [False, True], ids=["saving", "recomputing"])
@pytest.mark.parametrize("decision", [0, 1, 2], ids=["replicate", "keep", "regather"])
def test_a_table_in_slices_costs_what_it_does_in_the_whole_step(decision, recomputes):
    found, (_, _, ctx) = evaluator(), captured()
    group = group_of("words.weight", 1, found)
    key = found.uniform(decision).recomputing(found.sets[0] if recomputes else None)
    plan = found.plan_of(key.slicing(group, 4, None, ctx))
    whole, few = both(plan, ctx)
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.02)
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.02)
    assert few.prediction.compute_seconds == pytest.approx(
        whole.prediction.compute_seconds, rel=0.02
    )
    assert few.prediction.recomputed_bytes == whole.prediction.recomputed_bytes


@pytest.mark.thorough
def test_slices_of_a_layer_are_those_of_every_layer():
    found, (_, folded, ctx) = evaluator(), captured()
    group = group_of("blocks.0.up.weight", 0, found)
    assert len(group.layers) == LAYERS
    plan = found.plan_of(found.uniform(2).slicing(group, 4, None, ctx))
    for layer in folded.layers:
        assert {plan[name].slices for name in layer if name.endswith("up.weight")} == {4}
    # The saved tensors of the layers left out are as many bytes as without slices.
    whole, few = both(plan, ctx)
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.02)
    assert few.prediction.compute_seconds == pytest.approx(
        whole.prediction.compute_seconds, rel=0.02
    )


@pytest.mark.parametrize("recomputes", [False, True], ids=["saving", "recomputing"])
@pytest.mark.parametrize("name", ["last.weight", "blocks.0.up.weight"])
def test_slices_hold_no_gathers_of_other_layers(name, recomputes):
    """So the few layers hold as much as all."""
    found, (_, _, ctx) = evaluator(VOCABULARY), captured(VOCABULARY)
    key = found.uniform(2).recomputing(found.sets[0] if recomputes else None)
    plan = found.plan_of(key.slicing(group_of(name, 0, found), 4, None, ctx))
    whole, few = both(plan, ctx, VOCABULARY)
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.01)
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.01)


@pytest.mark.thorough
def test_a_layer_with_slices_of_its_own_is_refused():
    found, (_, folded, ctx) = evaluator(), captured()
    group = group_of("blocks.0.up.weight", 0, found)
    plan = found.plan_of(found.uniform(2).slicing(group, 4, None, ctx))
    whole = found.plan_of(found.uniform(2))
    rows = (whole[row.name] if row.name in folded.layers[6] else row for row in plan.parameters)
    with pytest.raises(ValueError, match="layer 6 of a folded step has other decisions"):
        predict(folded, plan.replace(parameters=tuple(rows)), ctx, PASSES)


def test_slices_are_tried_for_the_operators_at_the_peak():
    found, (_, _, ctx) = evaluator(), captured()
    lean = found.uniform(2).recomputing(found.sets[-1])
    found.evaluate(lean)
    table = group_of("words.weight", 1, found)
    assert [group for group in found.slice_groups if found.is_at_peak(group, lean)] == [table]
    (key,) = Neighbourhood(found).at_peak(lean)
    assert key == lean.slicing(table, 8, None, ctx)
    assert found.evaluate(key).prediction.peak_bytes < 0.9 * found.peak_bytes(lean)
    (then,) = Neighbourhood(found).at_peak(key)  # the peak is in the layers now
    assert then == key.slicing(group_of("blocks.0.up.weight", 0, found), 8, None, ctx)


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
def test_slices_lower_the_least_memory_of_a_folded_step(monkeypatch):
    step, folded, ctx = captured()
    least = least_limit(folded, ctx, PASSES).peak_bytes
    limited = ctx.replace(limit_bytes=least)
    plan = make_plan(folded, limited, PASSES)
    assert plan["words.weight"].slices > 1 and plan.prediction.peak_bytes <= least
    there = complete(plan, step, limited, PASSES)
    assert there.prediction.peak_bytes <= 1.02 * least
    assert there.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=0.03)
    monkeypatch.setattr(PlanEvaluator, "is_at_peak", lambda self, group, key: False)
    assert least < 0.9 * least_limit(folded, ctx, PASSES).peak_bytes


def test_a_limit_that_needs_no_slices_gets_none():
    _, folded, ctx = captured()
    plan = make_plan(folded, ctx.replace(limit_bytes=1 << 34), PASSES)
    assert all(row.slices == 1 for row in plan.parameters)
