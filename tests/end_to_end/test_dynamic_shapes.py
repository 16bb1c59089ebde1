"""Dynamic shapes: lengths that change compile at most twice; those of ranks may differ."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from osdp_compile import Plan
from osdp_compile.engine import backend
from osdp_compile.trace import trace_graphs
from passes.types.plan import OF_INPUT
from tests.chosen import more
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    finish_step,
    mean_over_ranks,
    plan_for,
    plan_in_force,
    plan_options,
    whole,
)

WORDS = 31


class Language(nn.Module):
    """Attention and an MLP; the epsilon of its norms is a float that must be a constant."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words):
        x = self.words(words)
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, length, 8)
        x = x + self.down(torch.relu(self.up(x)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def sentences(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (3, length), generator=generator)


def growing(step, micro, rank):
    """All ranks' lengths change alike: 6, 9, 12, 15."""
    return sentences(6 + 3 * step, 10 * step + rank)


def growing_apart(step, micro, rank):
    """Lengths 6 and 6, 6 and 8, 7 and 10, 8 and 12: rank 1 recompiles a step earlier."""
    return sentences(6 + max(step - 1, 0) + rank * (step + (step > 0)), 10 * step + rank)


def loss_of(model, batch):
    return model(batch)


def train(rank, world_size, plan, batch, dynamic):
    """Losses and the largest difference of a parameter, to one process's; graphs lowered."""
    torch.manual_seed(0)
    model = Language()
    recipe = Recipe(step=loss_of, batch=batch, optimizer=adamw, steps=4)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    if plan == "sliced":
        plan = plan_for(plan, model, world_size)
    options = plan_options(model, plan, recipe, world_size)
    lowered = []

    def lower(*args):
        lowered.append(args)
        return backend_lower(*args)

    backend_lower = backend.lower
    compiled = torch.compile(
        model, backend="osdp", options=options, dynamic=True if dynamic == "all" else None
    )
    optimizer = adamw(model.parameters())
    losses = []
    with mock.patch("osdp_compile.engine.backend.lower", lower):
        for step in range(recipe.steps):
            words = batch(step, 0, rank)
            if dynamic == "marked":
                torch._dynamo.mark_dynamic(words, 1)
            loss = compiled(words)
            loss.backward()
            losses.append(mean_over_ranks(loss))
            finish_step(model, optimizer, None, recipe)
    expected = reference.train(rank)
    furthest = max(
        (whole(p) - expected.parameters[name]).abs().max().item()
        for name, p in model.named_parameters()
    )
    return losses, expected.losses, furthest, len(lowered), plan_in_force(model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dynamic", "plan", "graphs"),
    [
        (None, "shard_keep", 2),
        *more(("all", "sliced", 1), ("all", "shard_regather", 1), ("marked", "replicate", 1)),
    ],
)
def test_lengths_that_change_compile_at_most_twice(two_ranks, dynamic, plan, graphs):
    for losses, expected, furthest, lowered, _ in two_ranks.run(train, plan, growing, dynamic):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert len(set(losses)) == 4
        assert furthest < 1e-5
        assert lowered == graphs


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dynamic", "plan"),
    [
        pytest.param("all", "sliced", marks=pytest.mark.inductor, id="dynamic=True"),
        pytest.param(None, 0.2, id="automatic, a limit"),
    ],
)
def test_lengths_that_differ_between_ranks(two_ranks, dynamic, plan):
    results = two_ranks.run(train, plan, growing_apart, dynamic)
    for losses, expected, furthest, _, _ in results:
        assert losses == pytest.approx(expected, abs=1e-5)
        assert len(set(losses)) == 4
        assert furthest < 1e-5
    assert [lowered for *_, lowered, _ in results] == ([1, 1] if dynamic else [2, 2])


@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [True, *more(False)])
def test_rows_of_any_number_are_multiplied_at_once_and_it_is_said(caplog, dynamic):
    model = Language()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
    plan = plan.split("head.weight", 3, along=OF_INPUT)
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        texts = trace_graphs(
            model, (sentences(6, 0),), world_size=2, plan=plan, options={"hardware": SLOW}
        )
    products = texts["forward/split"].count("= addmm(")
    assert products == (4 if dynamic else 4 + 2), "the head's product runs in slices, or does not"
    said = [one for one in caplog.messages if "slices the rows (tokens)" in one]
    assert len(said) == dynamic and all("head.weight" in one for one in said)
