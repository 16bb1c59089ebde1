"""Move rules: what is refused, with the reason; totals are gradients only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.capture.captured_step import NothingMoves, lay_out
from passes.graph.metadata import NOT_MOVED
from passes.graph.step_module import step_module
from passes.move.move_activations import move
from passes.pipeline import default_passes
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.passes.capture.test_captured_step import decided
from tests.passes.captures import capture_step

MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Between(nn.Module):
    """Two linears with something in between; x: [batch, 6]."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)
        self.scale = nn.Parameter(torch.ones(16))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self, self.up(x), x))
        return y


REFUSED = {
    "random numbers": lambda model, h, x: F.dropout(h, 0.5),
    "which is for this rank's tokens": lambda model, h, x: (
        h * torch.cumsum(x.repeat(1, 3)[:, :16], 1)
    ),
    "reads the parameter": lambda model, h, x: h * model.scale,
    "a sum over the tokens and features": lambda model, h, x: h - h.sum((0, 1), keepdim=True),
    "a sum over the tokens of all ranks": lambda model, h, x: h - h.sum(0),
    "has no rule": lambda model, h, x: torch.cumsum(h, 0),
    "one token a rank": lambda model, h, x: h * x[:, :1],
}


def refused_of(model: nn.Module, batch: Tensor, dims: dict[str, int]) -> dict[str, str]:
    captured, ctx = capture_step(model, batch, world_size=2)
    plan = decided(ctx, Decision.SHARD_REGATHER).tensor_parallel(dims)
    without = [one for one in default_passes() if one.name != "move"]
    laid = lay_out(captured, plan, ctx, without)
    step = move(step_module(laid.forward, laid.backward), ctx.replace(plan=plan))
    found = NOT_MOVED.of(step)
    if found:
        with pytest.raises(NothingMoves):
            lay_out(captured, plan, ctx, default_passes())
    return found


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused(reason: str) -> None:
    rows = 1 if reason == "one token a rank" else 4
    found = refused_of(Between(REFUSED[reason]), torch.randn(rows, 6), MLP)
    assert set(found) == set(MLP)
    if reason not in ("reads the parameter", "one token a rank"):
        assert any(reason in one for one in found.values()), found


def test_constants_and_pointwise_operators_are_not() -> None:
    def between(model: nn.Module, h: Tensor, x: Tensor) -> Tensor:
        return torch.where(h > 0.1, F.silu(h) * 2 + 1, torch.zeros_like(h)).clamp(max=3.0)

    assert refused_of(Between(between), torch.randn(4, 6), MLP) == {}


def test_half_a_group_is_refused() -> None:
    plain = Between(lambda model, h, x: F.gelu(h))
    assert set(refused_of(plain, torch.randn(4, 6), {"up.weight": 0})) == {"up.weight"}
    found = refused_of(plain, torch.randn(4, 6), {"up.weight": 0, "down.weight": 1})
    assert "bias" in found["up.weight"]


class Reused(nn.Module):
    """A weight of the MLP that is read once more; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y + self.up.weight.square().mean()


def test_a_weight_that_is_read_otherwise_too_is_refused() -> None:
    found = refused_of(Reused(), torch.randn(4, 6), MLP)
    assert "up.weight" in found


class Twice(nn.Module):
    """An MLP that is called twice; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(x)))
        return x


def test_an_mlp_that_is_called_twice_has_two_collectives_of_a_kind() -> None:
    from tests.passes.move.test_move_activations import check_training

    plan = check_training(Twice(), [torch.randn(3, 6) for _ in range(2)], MLP)
    assert plan.moved == set(MLP)


def test_a_plan_refuses_what_ranks_cannot_share() -> None:
    rows = [("w", torch.empty(6, 16)), ("b", torch.empty(5))]
    plan = Plan.uniform(rows, "replicate", world_size=4)
    with pytest.raises(ValueError, match=r"'w' of shape .* cannot stay on 4 ranks"):
        plan.tensor_parallel({"w": 0})
    assert plan.tensor_parallel({"w": 1})["w"].dim == 1
    again = Plan.from_dict(plan.tensor_parallel({"w": 1}).to_dict())
    assert again == plan.tensor_parallel({"w": 1})
    with pytest.raises(ValueError, match="moves='activations'"):
        Plan.from_dict(
            {
                **again.to_dict(),
                "parameters": [
                    {**row, "decision": {"scope": "none", "keep": False}}
                    for row in again.to_dict()["parameters"]
                ],
            }
        )


def test_the_step_of_another_model_has_no_reasons() -> None:
    captured, ctx = capture_step(nn.Linear(4, 4), torch.randn(2, 4), world_size=2)
    assert isinstance(ctx, Context)
    step = move(step_module(captured.forward, captured.backward), ctx)
    assert NOT_MOVED.get(step) is None
