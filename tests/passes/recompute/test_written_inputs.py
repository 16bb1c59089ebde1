"""Written inputs: the backward reads nothing that the forward has changed by then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from tests.passes.captures import capture_step


class Codebook(nn.Module):
    """Distances to a row of a buffer that the forward then changes."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.register_buffer("book", torch.randn(4, 6))
        self.is_whole = is_whole

    def forward(self, x: Tensor) -> Tensor:
        code = self.book.clone() if self.is_whole else self.book[torch.arange(4)]
        loss = (self.encoder(x) * code).square().mean()
        with torch.no_grad():
            self.book.mul_(0.9)
        return loss


def names(gm: fx.GraphModule) -> set[str]:
    return {node.name for node in gm.graph.find_nodes(op="placeholder")}


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_backward_does_not_read_a_buffer_that_the_forward_writes(is_whole: bool):
    captured, _ = capture_step(Codebook(is_whole), torch.randn(4, 8))
    written = {
        node.args[0].name
        for node in captured.forward.graph.find_nodes(
            op="call_function", target=torch.ops.aten.copy_.default
        )
    }
    assert written <= names(captured.forward) and len(written) == 1
    assert not written & names(captured.backward)
