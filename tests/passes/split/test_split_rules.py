"""Split rules: embeddings, losses, batched products, and values of padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.passes.split.test_split_operators import Experts, Words, check_step, trained


@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("name", ["words.weight", "mix.weight", "head.weight"])
def test_words_and_their_head(name: str, slices: int):
    torch.manual_seed(0)
    batches = [torch.randint(0, 11, (2, 5)) for _ in range(2)]
    along = 1 if name == "words.weight" else 0
    check_step(trained(Words(), batches), {name: (slices, along, None)})


@pytest.mark.parametrize("along", [0, 1, 2])
def test_a_batched_weight(along: int):
    torch.manual_seed(0)
    batches = [torch.randn(5, 3, 6) for _ in range(2)]
    check_step(trained(Experts(), batches), {"weight": (2, along, None)})


def test_what_is_made_of_nothing_is_not_added_up():
    """The logarithm of a padding's zero would make not a number of all."""

    class Logarithm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.up = nn.Linear(6, 23, bias=False)
            self.down = nn.Linear(23, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.log(self.up(self.first(x)).square())
            return self.down(hidden) + hidden.sum(-1, keepdim=True)

    torch.manual_seed(0)
    batches = [torch.randn(3, 6, dtype=torch.double) for _ in range(2)]
    rows = {"up.weight": (3, 0, None), "down.weight": (3, 1, "up.weight")}
    check_step(trained(Logarithm().double(), batches), rows)
