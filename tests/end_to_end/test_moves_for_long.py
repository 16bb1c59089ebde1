"""A long run of moving activations: batch sizes change, and weights travel where ranks differ."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.chosen import more
from tests.end_to_end.moving import its_loss
from tests.training import SLOW, Recipe, Reference, adamw, plan_in_force, train_osdp

STEPS = 300


class Tiny(nn.Module):
    """An embedding, an MLP with a residual, and a head by vocabulary; ids: [rows, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _ids(step: int, micro: int, rank: int) -> Tensor:
    """Rows: of four numbers, by step; every seventh step another number on some ranks."""
    rows = (2, 3, 5, 2)[step // 3 % 4]
    if step % 7 == 6:
        rows = (rows, 2, 4, 3)[(rank + step) % 4]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 64, (rows, 3), generator=generator)


def _train(rank, world_size):
    torch.manual_seed(0)
    model = Tiny().double()
    recipe = Recipe(step=its_loss, optimizer=adamw, steps=STEPS, batch=_ids, max_norm=1.0)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    with mock.patch("osdp_compile.lowering.warn.log.warning") as warned:
        ours = train_osdp(model, {"hardware": SLOW, "tensor_parallel": True}, recipe, rank)
    wanted = reference.train(rank)
    losses = max(abs(a - b) for a, b in zip(ours.losses, wanted.losses, strict=True))
    said = [call.args[0] for call in warned.call_args_list]
    return ours.distance(wanted), losses, plan_in_force(model).moved, said


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", ["two_ranks", *more("four_ranks")])
def test_300_steps_of_changing_batches_end_like_one_process(request, ranks):
    for apart, losses, moved, said in request.getfixturevalue(ranks).run(_train):
        assert apart < 1e-11 and losses < 1e-11
        assert not any("travel in this graph" in one for one in said)
        assert moved >= {"up.weight", "down.weight"}
