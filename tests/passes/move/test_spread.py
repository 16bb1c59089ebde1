"""Spread: local tensors beside placed ones, gathered, sliced or computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.passes.captures import capture_step
from tests.passes.move.test_move_activations import check_training, collectives
from tests.passes.move.test_move_rules import MLP, Between

READS = {
    "a value for each token": lambda model, h, x: h * x.sum(1, keepdim=True),
    "a pointwise operator with one": lambda model, h, x: torch.where(
        x[:, :1] > torch.arange(16) - 8, h, 2 * h
    ),
    "a number of the features": lambda model, h, x: h * torch.arange(16),
    "its own sum": lambda model, h, x: F.softmax(h, -1) + h.sum(1, keepdim=True),
}


@pytest.mark.parametrize("what", READS)
def test_what_it_reads_is_that_of_all_tokens(what: str) -> None:
    model = Between(READS[what])
    del model.scale
    check_training(model, [torch.randn(4, 6) for _ in range(2)], MLP, uses_p2p=True)


class Both(nn.Module):
    """Two operators that read one value for each token; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().exp().sum(1, keepdim=True)
        y: Tensor = self.down(torch.tanh(self.up(x) * scale) * scale)
        return y


def test_a_tensor_is_gathered_once() -> None:
    # Sums of exponentials are large: float32 rounds them by more than the tolerance.
    given = [torch.randn(4, 6, dtype=torch.float64) for _ in range(2)]
    plan = check_training(Both().double(), given, MLP)
    captured, ctx = capture_step(Both().double(), given[0], world_size=2)
    assert collectives(captured, plan, ctx)[0] == ["gather", "gather", "reduce"]
