"""Operators in slices, trained: after ten steps the parameters are a whole model's."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdp_compile import PeakMemory, Plan, plan_of
from passes.types.decision import Decision
from passes.types.plan import OF_INPUT
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    train_osdp,
    trains_like_reference,
)


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


def batch(step: int, micro: int, rank: int) -> Tensor:
    """The size of a batch changes at the fifth step: a graph is compiled again."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4 if step < 5 else 7, 8, generator=generator)


RECIPE = Recipe(optimizer=adamw, steps=10, batch=batch, max_norm=1.0)


class Wordy(nn.Module):
    """An embedding, an MLP, a head, and the loss of guessing the tokens; tokens: [rows, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, 24)
        self.up = nn.Linear(24, 53)
        self.down = nn.Linear(53, 24)
        self.head = nn.Linear(24, 61, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).flatten(0, 1)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x), tokens.flatten())


def some_tokens(step: int, micro: int, rank: int) -> Tensor:
    """More of them from the fifth step on: a graph is compiled again, for that number."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 61, (3 if step < 5 else 4, 7), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss


@pytest.mark.thorough
def test_slices_that_are_kept_or_some_of_them_train_like_a_whole_model(two_ranks):
    """All kinds of operators in slices, on two to four ranks: ``test_split_operators.py``."""
    plan = Plan.uniform(Wordy().named_parameters(), "shard_regather", world_size=2)
    words, *others = plan.parameters
    kept = dataclasses.replace(words, decision=Decision.SHARD_KEEP)
    plan = plan.replace(parameters=(kept, *others)).split("words.weight", 2, along=1)
    plan = plan.split("up.weight", 3, kept_slices=1)
    plan = plan.split("down.weight", 3, along=1, like="up.weight", kept_slices=2)
    plan = plan.split("head.weight", 3, along=OF_INPUT)
    recipe = Recipe(step=loss_of, batch=some_tokens, optimizer=adamw, steps=10, max_norm=1.0)
    outcome = trains_like_reference(two_ranks, Wordy, plan, recipe)
    assert outcome.decisions["words.weight"] == "shard_keep"


def _with_option(rank, world_size, slices):
    """In how many slices what runs, and how far parameters are from a whole model's."""
    torch.manual_seed(0)
    model = even()
    reference = Reference(copy.deepcopy(model), RECIPE, world_size)
    options = {"hardware": SLOW, "slices": slices}
    trained = train_osdp(model, options, RECIPE, rank).parameters
    wanted = reference.train(rank).parameters
    apart = max((trained[name] - wanted[name]).abs().max().item() for name in wanted)
    rows = plan_of(model).parameters
    return {row.name: row.slices for row in rows if row.slices > 1}, apart


@pytest.mark.thorough
def test_an_mlp_in_slices_by_an_option_trains_like_a_whole_one(two_ranks):
    """All that a name is sliced with; the planner decides on the rest."""
    for slices, apart in two_ranks.run(_with_option, {"?p.weight": 2, "up.weight": 4}):
        assert slices == {"up.weight": 4, "down.weight": 4}
        assert apart < 1e-5
    for slices, _ in two_ranks.run(_with_option, 1):
        assert not slices


def _refused(rank, world_size, slices):
    options = {"hardware": SLOW, "slices": slices}
    try:
        torch.compile(even(), backend="osdp", options=options)(batch(0, 0, rank))
    except Exception as error:
        return str(error)
    return "not refused"


def test_what_cannot_run_in_slices_is_refused_on_every_rank(two_ranks):
    for text in two_ranks.run(_refused, {"nothing.*": 2}):
        assert "option 'slices': no parameter's name matches 'nothing.*'" in text
    for text in two_ranks.run(_refused, {"up.bias": 2}):
        assert "parameter 'up.bias' cannot run in slices" in text


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
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    if slices > 1:
        plan = plan.split("head.weight", slices, along=OF_INPUT)
        plan = plan.replace(recompute=("head:mm:0",))
    recipe = Recipe(
        step=loss_of,
        batch=lambda step, micro, rank: torch.randint(
            0, WORDS, (4, TOKENS // 4), generator=torch.Generator().manual_seed(10 * step + rank)
        ),
        optimizer=adamw,
    )
    with PeakMemory() as memory:
        trained = train_osdp(model, {"plan": plan, "hardware": SLOW}, recipe, rank)
    predicted = plan_of(model).prediction
    return trained.losses, memory.peak_bytes, predicted.peak_bytes


@pytest.mark.inductor
@pytest.mark.thorough
def test_logits_by_tokens_are_never_there_whole_with_the_same_losses(two_ranks):
    whole, split = (two_ranks.run(guessed, slices) for slices in (1, 8))
    logits_bytes = 4 * WORDS * TOKENS
    for (losses, peak_bytes, predicted_bytes), (wanted, whole_bytes, _) in zip(
        split, whole, strict=True
    ):
        assert losses == pytest.approx(wanted, abs=1e-5)
        assert whole_bytes > logits_bytes > peak_bytes
        assert peak_bytes <= 1.01 * predicted_bytes
