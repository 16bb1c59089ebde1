"""RNG states: a random operator of a checkpointed region draws the same numbers in the backward."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from passes._torch import RUN_AND_SAVE_RNG_STATE, RUN_WITH_RNG_STATE
from tests.passes.captures import capture_step


class Dropped(nn.Module):
    """Dropout in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5).sin()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out.square().mean()


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def test_dropout_runs_again_from_the_saved_state_and_both_runs_have_a_value():
    step, _ = capture_step(Dropped(), torch.randn(4, 16))
    (ran,) = calls(step.forward, RUN_AND_SAVE_RNG_STATE)
    (runs,) = calls(step.backward, RUN_WITH_RNG_STATE)
    state, value = ran.meta["val"]
    assert state.dtype == torch.uint8
    assert runs.meta["val"].shape == value.shape
    assert runs.args[0].op == "placeholder"
