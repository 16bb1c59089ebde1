"""Activations that move to resting weights, trained: like one process that has all batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdp_compile import Plan, plan_of
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    train_osdp,
)

MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Mlp(nn.Module):
    """A linear, then two with an activation between them; x: [batch, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.up = nn.Linear(12, 64)
        self.down = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.tanh(self.first(x)))))


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64)


RECIPE = Recipe(optimizer=adamw, steps=10, batch=batch, max_norm=1.0)


def mean_square(model, batch):
    return model(batch).square().mean()


def _train(rank, world_size, rest, recipe):
    """How far parameters are from one process's, and which of them do not travel."""
    torch.manual_seed(0)
    model = Mlp().double()
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    plan = Plan.uniform(model.named_parameters(), rest, world_size=world_size)
    options = {"hardware": SLOW, "plan": plan.tensor_parallel(MLP), "debug": True}
    trained = train_osdp(model, options, recipe, rank)
    wanted = reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item()
        for name, one in trained.parameters.items()
    )
    placed = {name: str(p.placements[0]) for name, p in model.named_parameters()}
    return apart, trained.norms, wanted.norms, placed, plan_of(model)


@pytest.mark.parametrize("rest", ["replicate", "shard_regather"])
def test_an_mlp_that_stays_trains_like_one_process(two_ranks, rest):
    recipe = Recipe(step=mean_square, optimizer=adamw, steps=10, batch=batch, max_norm=1.0)
    for apart, norms, wanted, placed, plan in two_ranks.run(_train, rest, recipe):
        assert apart < 1e-11
        assert norms == pytest.approx(wanted, rel=1e-9)
        assert placed["up.weight"] == placed["up.bias"] == "S(0)"
        assert placed["down.weight"] == "S(1)"
        purposes = [one for order in plan.order.values() for one in order]
        assert sum(one.tokens for one in purposes) == 5
        assert not {n for one in purposes if not one.tokens for n in one.names} & set(MLP)


def differing(step: int, micro: int, rank: int) -> Tensor:
    """From the third step on, some ranks have other batches than others."""
    rows = {2: 4 + rank, 4: 4 - rank, 5: 1 + rank, 7: 6}.get(step, 4)
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(rows, 8, generator=generator, dtype=torch.float64)


def test_ranks_with_other_batches_train_like_one_process(two_ranks):
    """Weights travel in steps whose batches differ."""
    recipe = Recipe(step=mean_square, optimizer=adamw, steps=10, batch=differing, max_norm=1.0)
    for apart, norms, wanted, *_ in two_ranks.run(_train, "shard_regather", recipe):
        assert apart < 1e-11
        assert norms == pytest.approx(wanted, rel=1e-9)
