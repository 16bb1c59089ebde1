"""Lowering: its passes see what the planner's passes saw."""

from __future__ import annotations

import torch
from torch import nn

from osdp_compile import Plan
from osdp_compile.trace import fake_world
from passes.pipeline import Pass, Stage, default_passes
from passes.types.context import Phase
from tests.boxed import without_inductor
from tests.training import SLOW


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).square().mean()


def test_bytes_held_beside_a_graph_are_those_of_the_plan():
    """The loss, which the forward returns, is alive in the whole backward."""
    seen = []

    def see(gm, ctx):
        seen.append((ctx.phase, ctx.base_bytes))
        return gm

    model = TwoLayers()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
    passes = [*default_passes(), Pass("see", see, stage=Stage.PARTS)]
    options = {"hardware": SLOW, "plan": plan, "passes": passes}
    torch.compiler.reset()
    with fake_world(2), without_inductor():
        torch.compile(model, backend="osdp", options=options)(torch.randn(128, 32)).backward()
    torch.compiler.reset()
    lowered, planned = seen[-2:], seen[:-2]
    assert planned and set(planned) == set(lowered)
    held_bytes = dict(lowered)
    assert held_bytes[Phase.BACKWARD] > held_bytes[Phase.FORWARD]
