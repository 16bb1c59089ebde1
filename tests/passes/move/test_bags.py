"""Bags: tables of EmbeddingBag by rows compute what whole tables do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.candidates.move_groups import find_move_groups
from passes.ops.tables import PUT_BAGS, TAKE_BAGS
from tests.passes.captures import capture_step
from tests.passes.move.test_move_activations import check_training


class Bags(nn.Module):
    """Two tables of bags, and a linear; ids: [batch, ids of a bag]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(12, 6, **options)
        self.second = nn.EmbeddingBag(8, 6, **options)
        self.last = nn.Linear(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.last(torch.cat((self.first(ids), self.second(ids % 8)), 1))
        return y


@pytest.mark.parametrize("mode, world_size, uses_p2p", [("sum", 4, False), ("mean", 2, True)])
def test_bags_by_rows_compute_what_they_did(mode: str, world_size: int, uses_p2p: bool) -> None:
    model = Bags(mode=mode)
    given = [torch.randint(0, 12, (3, 5)) for _ in range(world_size)]
    captured, ctx = capture_step(model, given[0], world_size=world_size, uses_p2p=uses_p2p)
    groups = find_move_groups(captured, ctx).by_weights
    assert [group.dims for group, *_ in groups] == [{"first.weight": 0}, {"second.weight": 0}]
    check_training(model, given, {"first.weight": 0, "second.weight": 0}, uses_p2p)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_rows_that_the_ranks_do_not_divide(mode: str) -> None:
    """Of the second table's 8 rows, three ranks have 3, 3 and 2."""
    given = [torch.randint(0, 12, (3, 5)) for _ in range(3)]
    check_training(Bags(mode=mode), given, {"first.weight": 0, "second.weight": 0})


@pytest.mark.parametrize("options", [{"mode": "max"}, {"padding_idx": 3, "mode": "sum"}])
def test_other_bags_are_refused(options: dict[str, Any]) -> None:
    captured, ctx = capture_step(Bags(**options), torch.randint(0, 12, (3, 5)), world_size=2)
    found = find_move_groups(captured, ctx)
    assert not found.groups
    assert "_embedding_bag has no rule" in found.refused["first.weight"]


@pytest.mark.parametrize("mean", [False, True])
def test_bags_of_any_length(mean: bool) -> None:
    """Two ranks, each with three bags; one bag is empty."""
    table = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 7, 7, 2], [0, 3, 4, 4]])
    offsets = torch.tensor([[0, 1, 1], [0, 2, 3]])
    mode = "mean" if mean else "sum"
    wanted = torch.cat(
        [
            nn.functional.embedding_bag(one, table, first, mode=mode)
            for one, first in zip(ids, offsets, strict=True)
        ]
    )
    flat = ids.flatten(), offsets.flatten()
    parts = [
        TAKE_BAGS(table.detach()[start : start + 4], *flat, 2, start, 8, mean) for start in (0, 4)
    ]
    torch.testing.assert_close(sum(parts), wanted.detach())
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    found = [PUT_BAGS(*flat, gradient, 2, start, 4, mean) for start in (0, 4)]
    torch.testing.assert_close(torch.cat(found), table.grad)
    with pytest.raises(IndexError):
        TAKE_BAGS(table.detach()[:4], ids.flatten() + 1, offsets.flatten(), 2, 0, 8, mean)
