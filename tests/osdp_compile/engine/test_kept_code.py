"""Kept code: a second start with a given plan and profile finds the compiled graphs again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from osdp_compile import Plan
from osdp_compile.trace import fake_world
from passes.types.hardware import generic

FOUND, MISSED, BYPASSED = (f"fxgraph_cache_{one}" for one in ("hit", "miss", "bypass"))


def started(decision: str) -> Mapping[str, int]:
    """What a start with a plan of one decision finds in Inductor's cache."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = Plan.uniform(list(model.named_parameters()), decision, world_size=8)
    options = {"plan": plan, "hardware": generic()}
    torch.compile(model, backend="osdp", options=options)(torch.ones(4, 8)).sum().backward()
    found = counters["inductor"]
    return {name: found[name] for name in (FOUND, MISSED, BYPASSED)}


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_start_with_a_given_plan_finds_the_code_of_this_plan_only():
    """On a fake group, too. Forward and backward are two graphs."""
    with fake_world(8), fresh_cache():
        assert started("shard_regather") == {FOUND: 0, MISSED: 2, BYPASSED: 0}
        assert started("shard_regather") == {FOUND: 2, MISSED: 0, BYPASSED: 0}
        # Another plan has other graphs, and the key has the graphs after all passes.
        assert started("replicate") == {FOUND: 0, MISSED: 2, BYPASSED: 0}
        assert started("shard_regather") == {FOUND: 2, MISSED: 0, BYPASSED: 0}
    torch._dynamo.reset()
