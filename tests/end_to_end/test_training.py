"""A small GPT trained by every plan equals one process that trains on all ranks' batches.

Losses are compared to 1e-5. Parameters may be no further from the one process than twice
what DDP's are in the same run: sums over ranks and over a batch round differently.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from examples.gpt import GPT, GPTConfig
from tests.chosen import more
from tests.training import (
    Recipe,
    Trained,
    adamw,
    finish_step,
    mean_over_ranks,
    plan_in_force,
    plan_options,
    sgd,
    train_osdp,
)

# 61 words: no world size divides the embedding.
TWO_LAYERS = GPTConfig(vocab=61, layers=2, width=64, heads=2, context=12)
ONE_LAYER = dataclasses.replace(TWO_LAYERS, layers=1)
BATCH = 2
#: Of the way from the least possible limit to no limit: so near the least that one decision for
#: all parameters either does not fit or is not the fastest.
NEAR_THE_LEAST = 0.1


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    """Rows of 13 tokens of a language in which each word follows from the one before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(TWO_LAYERS.vocab, (BATCH, 1), generator=generator)
    return (first + 3 * torch.arange(TWO_LAYERS.context + 1)) % TWO_LAYERS.vocab


def next_word(model, rows):
    return model(rows[:, :-1], rows[:, 1:])


def recipe_for(optimizer) -> Recipe:
    return Recipe(step=next_word, batch=tokens, optimizer=optimizer, steps=10)


def train_alone(model, recipe: Recipe, world_size: int) -> Trained:
    """One process, each step on the concatenation of all ranks' batches."""
    return _train(
        model,
        model,
        recipe,
        lambda step: torch.cat([recipe.batch(step, 0, rank) for rank in range(world_size)]),
        lambda loss: loss.item(),
    )


def train_ddp(model, recipe: Recipe, rank: int) -> Trained:
    return _train(
        DistributedDataParallel(model),
        model,
        recipe,
        lambda step: recipe.batch(step, 0, rank),
        mean_over_ranks,
    )


def _train(call, model, recipe, batch_of, loss_of) -> Trained:
    optimizer = recipe.optimizer(model.parameters())
    losses = []
    for step in range(recipe.steps):
        loss = recipe.step(call, batch_of(step))
        loss.backward()
        losses.append(loss_of(loss))
        finish_step(model, optimizer, None, recipe)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, [], parameters, {})


def train_three_ways(rank, world_size, config, plan, optimizer):
    recipe = recipe_for(optimizer)
    model = GPT(config)
    alone, ddp = copy.deepcopy(model), copy.deepcopy(model)
    options = plan_options(model, plan, recipe, world_size)
    osdp = train_osdp(model, options, recipe, rank)
    decisions = {row.name: row.decision.name for row in plan_in_force(model).parameters}
    return (
        decisions,
        osdp,
        train_ddp(ddp, recipe, rank),
        train_alone(alone, recipe, world_size),
    )


def distance(one: Trained, other: Trained) -> float:
    """The largest difference of any element of any parameter."""
    assert list(one.parameters) == list(other.parameters)
    return max(
        (one.parameters[name] - other.parameters[name]).abs().max().item()
        for name in other.parameters
    )


def equals_one_process(ranks, config, plan, optimizer) -> set[str]:
    """Assert it of every rank; returns the decisions that were taken."""
    results = ranks.run(train_three_ways, config, plan, optimizer)
    for rank, (_, osdp, ddp, alone) in enumerate(results):
        assert alone.losses[-1] < alone.losses[0] - 0.1, "one process does not learn"
        assert osdp.losses == pytest.approx(alone.losses, abs=1e-5), f"rank {rank}"
        allowed = 2 * max(distance(ddp, alone), 1e-6)
        assert distance(osdp, alone) <= allowed, f"rank {rank}"
        print(f"rank {rank}: osdp {distance(osdp, alone):.1e}, DDP {distance(ddp, alone):.1e}")
    return {decision for decisions, *_ in results for decision in decisions.values()}


# With the other optimizer each is trained on four ranks, below.
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [("shard_keep", adamw), *more(("replicate", sgd), ("shard_regather", sgd))],
)
def test_one_decision_for_all_parameters_equals_one_process(two_ranks, plan, optimizer):
    assert equals_one_process(two_ranks, TWO_LAYERS, plan, optimizer) == {plan}


@pytest.mark.thorough
def test_the_planners_own_mix_equals_one_process(two_ranks):
    taken = equals_one_process(two_ranks, ONE_LAYER, NEAR_THE_LEAST, adamw)
    assert len(taken) > 1, "the limit does not force a mix"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [("shard_regather", sgd), *more(("shard_keep", sgd), ("replicate", adamw))],
)
def test_four_ranks_equal_one_process(four_ranks, plan, optimizer):
    assert equals_one_process(four_ranks, ONE_LAYER, plan, optimizer) == {plan}
