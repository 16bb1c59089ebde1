"""Lent: what the forward also returns, and the gradients that a backward begins with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from passes.graph.metadata import LENT, SAVED
from passes.graph.step_module import graphs_of, step_module
from passes.simulate.lent import lend
from tests.passes.captures import capture_step


class Classifier(nn.Module):
    """As those of Hugging Face: its loss, and the logits, which the backward reads."""

    def __init__(self, returns_logits: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 32)
        self._returns_logits = returns_logits

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(torch.tanh(self.body(x)))
        loss = functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        return (loss, logits) if self._returns_logits else (loss,)


def lent_and_saved(returns_logits: bool) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of what the backward is given: lent, and its own."""
    captured, ctx = capture_step(Classifier(returns_logits), torch.randn(4, 8))
    _, backward = graphs_of(lend(step_module(captured.forward, captured.backward), ctx))
    given = [n for n in backward.graph.nodes if n.op == "placeholder"]
    saved = [node for node in given if SAVED.get(node)]
    shape = {node: tuple(node.meta["val"].shape) for node in saved}
    lent = [shape[node] for node in saved if LENT.is_set(node)]
    return sorted(lent), sorted(shape[node] for node in saved if not LENT.is_set(node))


def test_what_only_the_backward_has_is_its_own():
    lent, own = lent_and_saved(returns_logits=False)
    assert lent == [()]  # the loss's gradient
    assert (4, 16) in own and (4, 32) in own


def test_what_the_forward_returns_and_the_gradients_of_it_are_lent():
    lent, own = lent_and_saved(returns_logits=True)
    assert lent == [(), (4, 32), (4, 32)]  # and the logits, and their gradient
    assert (4, 16) in own and (4, 32) not in own
