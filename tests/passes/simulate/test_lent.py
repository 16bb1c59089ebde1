"""Lent: what the forward also returns, and the gradients that a backward begins with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from passes.annotate.annotate_costs import annotate
from passes.graph.metadata import LENT, SAVED, STORAGE
from passes.graph.step_module import graphs_of, step_module
from passes.simulate.lent import lend
from passes.simulate.memory import memory_of
from passes.types.context import Phase
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


class Parts(nn.Module):
    """Products of the first parts of a product. The backward needs only these parts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.up(x).chunk(4, -1)
        return sum(down(part).sum() for down, part in zip(self.down, parts, strict=False))


@pytest.mark.parametrize("count", [1, 2])
def test_saved_parts_keep_the_whole_once(count: int):
    captured, ctx = capture_step(Parts(count), torch.randn(4, 8))
    forward, backward = graphs_of(lend(step_module(captured.forward, captured.backward), ctx))
    annotate(forward, ctx.replace(phase=Phase.FORWARD))
    annotate(backward, ctx.replace(phase=Phase.BACKWARD))
    saved = [node for node in backward.graph.nodes if STORAGE.is_set(node)]
    assert [tuple(node.meta["val"].shape) for node in saved] == [(4, 16)] * count
    assert {STORAGE.of(node).size_bytes for node in saved} == {4 * 64 * 4}
    loss_bytes = 4
    assert memory_of(forward.graph).kept_bytes == 4 * 64 * 4 + loss_bytes
    given = len(backward.graph.find_nodes(op="placeholder"))
    assert memory_of(backward.graph).curve[given - 1] == 4 * 64 * 4 + loss_bytes
