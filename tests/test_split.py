"""Operators in slices, trained: after ten steps the parameters are a whole model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdp_compile import Plan
from tests.training import Recipe, adamw, trains_like_reference


class Mlp(nn.Module):
    """A linear, then two with an activation between them; x: [batch, 8]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.up = nn.Linear(12, hidden)
        self.down = nn.Linear(hidden, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.tanh(self.first(x)))))


def even() -> nn.Module:
    return Mlp(64)


def uneven() -> nn.Module:
    return Mlp(53)


def batch(step: int, micro: int, rank: int) -> Tensor:
    """The size of a batch changes at the fifth step: a graph is compiled again."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4 if step < 5 else 7, 8, generator=generator)


RECIPE = Recipe(optimizer=adamw, steps=10, batch=batch, max_norm=1.0)


@pytest.mark.parametrize(("make", "slices"), [(even, 4), (uneven, 3)])
def test_an_mlp_in_slices_trains_like_a_whole_one(two_ranks, make, slices: int):
    plan = Plan.uniform(make().named_parameters(), "shard_again", world_size=2)
    plan = plan.split("up.weight", slices).split("down.weight", slices, along=1, like="up.weight")
    outcome = trains_like_reference(two_ranks, make, plan, RECIPE)
    assert outcome.decisions["up.weight"] == "shard_again"
