"""Move: products with resting weights compute what gathered weights do, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.capture.captured_step import lay_out
from passes.graph.metadata import COLLECTIVE
from passes.pipeline import Stage, default_passes, run
from passes.types.context import Context, Phase
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import Gated, Mlp

MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
BARE = {"up.weight": 0, "down.weight": 1}
GATED = {"up.weight": 0, "gate.weight": 0, "down.weight": 1}


def batches(model: nn.Module, world_size: int) -> list[Tensor]:
    shape = (3, 5, 6) if isinstance(model, Gated) else (5, 6)
    return [torch.randn(shape) for _ in range(world_size)]


def training(model: nn.Module, world_size: int) -> Training:
    given = batches(model, world_size)
    return Training(model, given, [torch.randn_like(model(one)) for one in given])


@pytest.mark.parametrize("uses_p2p", [False, True])
@pytest.mark.parametrize("rest", [Decision.REPLICATE, Decision.SHARD_REGATHER])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "model, dims", [(Mlp(16, True), MLP), (Mlp(16, False), BARE), (Gated(), GATED)]
)
def test_products_compute_what_they_did(
    model: nn.Module, dims: dict[str, int], world_size: int, rest: Decision, uses_p2p: bool
) -> None:
    made = training(model, world_size)
    captured, ctx = capture_step(model, made.batches[0], world_size=world_size, uses_p2p=uses_p2p)
    contexts = [ctx.replace(rank=rank) for rank in range(world_size)]
    plan = decided(ctx, rest).tensor_parallel(dims)
    assert collectives(captured, plan, ctx) == (
        ["gather", "reduce"],
        ["gather", "gather", "reduce"],
    )
    made.check(captured, contexts, plan)


def check_training(model: nn.Module, given: list[Tensor], dims: dict[str, int]) -> Plan:
    """Compare outputs and gradients with eager PyTorch; returns the plan."""
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = capture_step(model, given[0], world_size=len(given))
    plan = decided(ctx, Decision.SHARD_REGATHER).tensor_parallel(dims)
    made.check(captured, [ctx.replace(rank=rank) for rank in range(len(given))], plan)
    return plan


def collectives(captured: Any, plan: Plan, ctx: Context) -> tuple[list[str], list[str]]:
    """The kinds of the collectives of tokens in the forward and in the backward, sorted."""
    laid = lay_out(captured, plan, ctx, default_passes())
    found = []
    for gm, phase in ((laid.forward, Phase.FORWARD), (laid.backward, Phase.BACKWARD)):
        gm = run(default_passes(), Stage.PARTS, gm, ctx.replace(plan=plan, phase=phase))
        purposes = [COLLECTIVE.of(n) for n in gm.graph.nodes if COLLECTIVE.is_set(n)]
        served = {name for one in purposes for name in one.names if not one.tokens}
        assert not served & plan.moved
        found.append(sorted("gather" if p.gathers else "reduce" for p in purposes if p.tokens))
    return found[0], found[1]
