"""Operators in slices, trained: after ten steps the parameters are a whole model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdp_compile import PeakMemory, Plan, plan_of
from passes.decisions import OF_INPUT
from tests.training import SLOW, Recipe, adamw, train_osdp, trains_like_reference


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


WORDS, TOKENS = 8192, 256


class Guessing(nn.Module):
    """Many words, few dimensions, and the loss of guessing them; tokens: [batch, tokens]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.mix(self.words(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def guessed(rank, world_size, slices):
    """Losses, bytes at the peak of the steps, and those that were predicted."""
    torch.manual_seed(0)
    model = Guessing()
    plan = Plan.uniform(model.named_parameters(), "shard_again", world_size=world_size)
    if slices > 1:
        plan = plan.split("head.weight", slices, along=OF_INPUT)
        plan = plan.replace(recompute=("head:mm:0",))
    recipe = Recipe(
        step=lambda model, tokens: model(tokens),
        batch=lambda step, micro, rank: torch.randint(
            0, WORDS, (4, TOKENS // 4), generator=torch.Generator().manual_seed(10 * step + rank)
        ),
        optimizer=adamw,
    )
    with PeakMemory() as memory:
        trained = train_osdp(model, {"plan": plan, "hardware": SLOW}, recipe, rank)
    predicted = plan_of(model).prediction
    return trained.losses, memory.peak_bytes, predicted.peak_bytes


def test_logits_by_tokens_are_never_there_whole_with_the_same_losses(two_ranks):
    whole, split = (two_ranks.run(guessed, slices) for slices in (1, 8))
    logits_bytes = 4 * WORDS * TOKENS
    for (losses, peak_bytes, predicted_bytes), (wanted, whole_bytes, _) in zip(
        split, whole, strict=True
    ):
        assert losses == pytest.approx(wanted, abs=1e-5)
        assert whole_bytes > logits_bytes > peak_bytes
        assert peak_bytes <= 1.01 * predicted_bytes
