"""Predict: the prediction is that of the lowered plan; the cache of fake values changes nothing."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from passes.graph.fx_utils import shared_values
from passes.graph.printer import graph_text
from passes.pipeline import default_passes
from passes.plan.planner import make_plan
from passes.pricing import predict as module
from passes.pricing.predict import predict
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.passes.captures import capture_step
from tests.passes.plan.test_planner import PASSES, captured, limits


class Net(nn.Module):
    """Equal layers, and two convolutions that differ in numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(8, 8, 3, padding=1)
        self.far = nn.Conv1d(8, 8, 3, padding=2, dilation=2)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in "ab"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.far(self.near(x)) + x).square().mean()


@pytest.mark.parametrize("decision", [Decision.REPLICATE, Decision.SHARD_REGATHER])
def test_shared_values_change_no_prediction_and_no_graph(decision, monkeypatch):
    torch.manual_seed(0)
    captured_step, ctx = capture_step(Net(), torch.randn(4, 8, 16), deciding=True)
    named = [(one.name, one) for one in ctx.parameters]
    plan = Plan.uniform(named, decision, world_size=ctx.world_size)
    found = []
    for share in (shared_values, lambda known: contextlib.nullcontext()):
        monkeypatch.setattr(module, "shared_values", share)
        # With the cache twice: the second time everything is known.
        for _ in range(2):
            step = predict(captured_step, plan, ctx, default_passes())
            texts = [graph_text(gm, ctx) for gm in (step.forward, step.backward)]
            found.append((step.prediction, *texts))
    assert captured_step.values
    assert found[1:] == found[:1] * 3


def test_the_prediction_is_what_the_simulator_says_of_the_plan():
    step, ctx = captured("biased")
    limited = ctx.replace(limit_bytes=limits(step, ctx, 3)[1])
    plan = make_plan(step, limited, PASSES)
    assert predict(step, plan, limited, PASSES).prediction == plan.prediction


def test_planning_leaves_the_captured_graphs_alone():
    step, ctx = captured("biased")
    before = str(step.forward.graph), str(step.backward.graph)
    make_plan(step, ctx.replace(limit_bytes=limits(step, ctx, 3)[1]), PASSES)
    assert (str(step.forward.graph), str(step.backward.graph)) == before
