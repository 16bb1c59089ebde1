"""Tokens that move to the table of an embedding, or to a head with its loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.chosen import more, thorough
from tests.end_to_end.moving import Language, Words, its_loss, mean_square
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    plan_in_force,
    train_osdp,
)


class Bags(nn.Module):
    """Means of bags of words, and a linear; tokens: [rows, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(64, 8, mode="mean")
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.words(tokens)))


def _words(rank, world_size, make):
    """Distance from one process; the placement of the table."""
    torch.manual_seed(0)
    model = make().double()

    def tokens(step, micro, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        rows = 3 + (rank if step == 4 else 0)
        return torch.randint(0, 64, (rows, 5), generator=generator)

    recipe = Recipe(step=mean_square, optimizer=adamw, steps=8, batch=tokens, max_norm=0.05)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": ["words.*"], "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = ours.distance(wanted)
    return apart, plan_in_force(model).moved, str(model.words.weight.placements)


@pytest.mark.parametrize("make", [Words, *thorough(Bags)])
def test_the_table_of_an_embedding_stays(two_ranks, make):
    """In one step the ranks have other batches: the table travels."""
    for apart, moved, placed in two_ranks.run(_words, make):
        assert apart < 1e-11
        assert moved == {"words.weight"} and placed == "(Shard(dim=0),)"


def _ids(step, micro, rank):
    """In step 4 the ranks have other batches."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 61, (3 + (rank if step == 4 else 0), 5), generator=generator)


def _language(rank, world_size, tied, named, words):
    """Distances from one process: parameters, losses, norms; the weights that stay; placements."""
    torch.manual_seed(0)
    model = Language(tied, words).double()
    recipe = Recipe(
        step=its_loss, optimizer=adamw, steps=10, batch=_ids, backwards=2, max_norm=0.05
    )
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": [named], "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = ours.distance(wanted)
    losses = max(abs(a - b) for a, b in zip(ours.losses, wanted.losses, strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(ours.norms, wanted.norms, strict=True))
    placed = {str(p.placements) for p in model.parameters() if p.dim() == 2 and p.shape[0] == words}
    return apart, losses, norms, plan_in_force(model).moved, placed


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "tied", "words"),
    [
        ("two_ranks", True, 64),
        ("four_ranks", False, 61),
        *more(("two_ranks", False, 64), ("two_ranks", True, 61), ("four_ranks", True, 63)),
    ],
)
def test_a_head_with_its_loss_trains_like_one_process(request, ranks, tied, words):
    """The ranks do not divide 61 and 63 words."""
    named = "words.weight" if tied else "head.weight"
    for apart, losses, norms, moved, placed in request.getfixturevalue(ranks).run(
        _language, tied, named, words
    ):
        assert apart < 1e-11 and losses < 1e-11 and norms < 1e-9
        assert moved == ({"words.weight"} if tied else {"head.weight", "head.bias"})
        assert "(Shard(dim=0),)" in placed
