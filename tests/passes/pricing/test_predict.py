"""Predict: the prediction is that of the lowered plan; the cache of fake values changes nothing."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from passes.annotate.training_state import IN_FLIGHT
from passes.graph.fx_utils import bytes_of, output_node, shared_values
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


@pytest.mark.usefixtures("short_search")
def test_the_prediction_is_what_the_simulator_says_of_the_plan():
    step, ctx = captured("biased")
    limited = ctx.replace(limit_bytes=limits(step, ctx, 3)[1])
    plan = make_plan(step, limited, PASSES)
    assert predict(step, plan, limited, PASSES).prediction == plan.prediction


@pytest.mark.usefixtures("short_search")
def test_planning_leaves_the_captured_graphs_alone():
    step, ctx = captured("biased")
    before = str(step.forward.graph), str(step.backward.graph)
    make_plan(step, ctx.replace(limit_bytes=limits(step, ctx, 3)[1]), PASSES)
    assert (str(step.forward.graph), str(step.backward.graph)) == before


@pytest.mark.parametrize("decision", [Decision.SHARD_KEEP, Decision.SHARD_REGATHER])
def test_calls_in_flight_hold_what_a_forward_keeps_and_no_bytes_at_the_optimizers_step(decision):
    step, ctx = captured("biased")
    plan = Plan.uniform([(p.name, p) for p in ctx.parameters], decision, world_size=ctx.world_size)
    alone = predict(step, plan, ctx, PASSES)
    found = predict(step, plan, ctx.replace(calls_in_flight=4, gradient_buffers=2), PASSES)
    kept_bytes = alone.simulations[0].memory.kept_bytes
    (loss,) = (node for node in output_node(step.forward.graph).args[0][:1])
    more_bytes = 3 * (kept_bytes + alone.returned_bytes) + 2 * bytes_of(loss.meta["val"])
    assert kept_bytes > 0
    assert found.base[IN_FLIGHT] == more_bytes
    in_graphs = zip(found.base_bytes, alone.base_bytes, strict=True)
    assert [one - other for one, other in in_graphs] == [more_bytes, more_bytes, 0]
