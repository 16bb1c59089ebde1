"""Origins: the weight that a dimension of a tensor comes from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.graph.fx_utils import output_node
from passes.split.origins import origin
from tests.passes.captures import capture_step


class Heads(nn.Module):
    """A linear, its features by heads, and a bias from a table; x: [batch, length, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.table = nn.Linear(8, 12), nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = torch.tanh(self.up(x)).unflatten(-1, (4, 3)).transpose(1, 2)
        return heads, self.table(torch.arange(5)).T.unsqueeze(0)


@pytest.mark.parametrize(
    ("which", "dim", "wanted"),
    [
        (0, 1, ("up.weight", 0)),  # heads
        (0, 0, None),  # sequences
        (0, 2, None),
        (1, 1, None),  # a lookup
    ],
)
def test_a_dimension_comes_from_a_weight(
    which: int, dim: int, wanted: tuple[str, int] | None
) -> None:
    captured, _ = capture_step(Heads(), torch.randn(2, 5, 8))
    returned = output_node(captured.forward.graph).args[0]
    assert origin(returned[which], dim) == wanted  # type: ignore[index,arg-type]
