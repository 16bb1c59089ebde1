"""Folded moves: a folded step whose activations move costs what the whole one does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.candidates.move_groups import MoveGroup
from passes.capture.fold_layers import fold
from passes.plan.planner import make_plan
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.predict import predict
from passes.types.decision import Moves
from passes.types.hardware import LinkRate
from tests.chosen import more, thorough
from tests.passes.capture.test_fold_layers import (
    LAYERS,
    NETWORKS,
    PASSES,
    WIDTH,
    WORLD,
    Deep,
    both,
    captured,
    folded,
    network,
)
from tests.passes.captures import capture_step
from tests.passes.graphs import two_dimensions, with_mesh_dims


@functools.cache
def evaluator(wires: str = "even", within_hosts: bool = False) -> PlanEvaluator:
    """Of the folded step, with collectives on the spot."""
    ctx = captured()[1].replace(tensor_parallel=True, limit_bytes=0)
    ctx = ctx.replace(hardware=network(NETWORKS[wires]))
    if within_hosts:
        rate = LinkRate(1e-6, NETWORKS[wires])
        hardware = with_mesh_dims(ctx.hardware, rate, rate)
        ctx = ctx.replace(hardware=hardware, mesh_dims=two_dimensions(2, WORLD))
    return PlanEvaluator(folded(), ctx, PASSES)


def group_of(name: str, found: PlanEvaluator, keeps: bool = False) -> MoveGroup:
    groups = (group for group in found.move_groups.groups if name in group.dims)
    return next(group for group in groups if group.decision.keep == keeps)


def test_the_groups_of_a_folded_step_have_every_layer() -> None:
    dims = group_of("blocks.0.up.weight", evaluator()).dims
    assert dims["blocks.7.down.weight"] == 1  # of a layer left out
    assert len(dims) == 3 * LAYERS


@pytest.mark.parametrize("wires", NETWORKS)
@pytest.mark.parametrize(
    ("within_hosts", "what"),
    [
        (False, "saving"),
        (True, "keeping tokens"),
        *thorough((True, "recomputing")),
        *more((True, "saving"), (False, "recomputing"), (False, "keeping tokens")),
    ],
)
def test_moves_cost_what_they_do_in_the_whole_step(wires, within_hosts, what) -> None:
    found = evaluator(wires, within_hosts)
    ctx = found.ctx
    key = found.uniform(2).recomputing(found.sets[-1] if what == "recomputing" else None)
    group = group_of("blocks.0.up.weight", found, keeps=what == "keeping tokens")
    plan = found.plan_of(key.moving(group, True, ctx))
    whole, few = both(plan, ctx)
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.02)
    assert few.prediction.recomputed_bytes == whole.prediction.recomputed_bytes
    whole, few = both(plan, ctx.replace(limit_bytes=None))
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.02)
    assert few.prediction.compute_seconds == pytest.approx(
        whole.prediction.compute_seconds, rel=0.01
    )


class Attention(nn.Module):
    """A norm, and attention of 4 heads; x: [rows, length, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (4, 8)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2))
        return out


@pytest.mark.thorough
@pytest.mark.parametrize("keep_tokens", [False, *more(True)])
def test_attention_in_chunks_costs_what_it_does_in_the_whole_step(keep_tokens: bool) -> None:
    model = nn.Sequential(*(Attention() for _ in range(10)))
    step, ctx = capture_step(model, torch.randn(4, 16, 32), world_size=2)
    few = fold(step, ctx.parameters)
    assert few is not None
    ctx = ctx.replace(
        tensor_parallel=True, hardware=network(NETWORKS["slow"]), deciding=True, limit_bytes=0
    )
    found = PlanEvaluator(few, ctx, PASSES)
    group = group_of("0.q.weight", found, keep_tokens)
    assert group.has_chunks and len(group.dims) == 4 * 10
    plan = found.plan_of(found.uniform(2).moving(group, True, ctx, 2))
    whole = predict(step, plan, ctx, PASSES).prediction
    same = predict(few, plan, ctx, PASSES).prediction
    assert same.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
    ctx = ctx.replace(limit_bytes=None)
    whole = predict(step, plan, ctx, PASSES).prediction
    same = predict(few, plan, ctx, PASSES).prediction
    assert same.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "moves"),
    [(4, Moves.ACTIVATIONS), (256, Moves.WEIGHT)],
    ids=["few", "many"],
)
def test_the_planner_moves_the_smaller_thing_in_every_layer(rows: int, moves: Moves) -> None:
    model = Deep([4 * WIDTH] * LAYERS)
    step, ctx = capture_step(model, torch.randn(rows, WIDTH), world_size=WORLD)
    ctx = ctx.replace(tensor_parallel=True, hardware=network(NETWORKS["slow"]))
    few = fold(step, ctx.parameters)
    assert few is not None
    plan = make_plan(few, ctx, PASSES)
    without = make_plan(few, ctx.replace(tensor_parallel=False), PASSES).prediction
    assert plan.prediction.step_seconds <= without.step_seconds
    assert {plan[f"blocks.{layer}.up.weight"].moves for layer in range(LAYERS)} == {moves}
    there = predict(step, plan, ctx.replace(deciding=True), PASSES).prediction
    assert there.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=0.05)
