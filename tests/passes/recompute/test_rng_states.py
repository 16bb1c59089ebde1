"""RNG states: a random operator of a checkpointed region draws the same numbers in the backward."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from passes._torch import RUN_AND_SAVE_RNG_STATE, RUN_WITH_RNG_STATE
from tests.passes.captures import capture_step


class Resampled(nn.Module):
    """Rows drawn in a checkpointed region: an operator that every torch runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def inner(self, x: Tensor) -> Tensor:
        return self.linear(x)[torch.multinomial(x.new_ones(4), 4)].sin()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out.square().mean()


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def test_rows_are_drawn_again_from_the_saved_state_and_both_runs_have_a_value():
    step, _ = capture_step(Resampled(), torch.randn(4, 16))
    (ran,) = calls(step.forward, RUN_AND_SAVE_RNG_STATE)
    (runs,) = calls(step.backward, RUN_WITH_RNG_STATE)
    state, value = ran.meta["val"]
    assert state.dtype == torch.uint8 and value.dtype == torch.int64
    assert runs.meta["val"].shape == value.shape
    assert runs.args[0].op == "placeholder"
