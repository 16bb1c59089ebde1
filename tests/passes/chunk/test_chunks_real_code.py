"""Chunks in Inductor's real code: products and collectives keep the order of the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.graph.fx_utils import WAIT, is_collective
from passes.graph.metadata import COLLECTIVE
from passes.types.plan import Plan
from tests.passes.inductor_code import compiled_step
from tests.passes.split.test_split_operators import Mlp

pytestmark = pytest.mark.inductor

_aten = torch.ops.aten


class Loss(nn.Module):
    """An MLP, and the mean of its squares; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(64, True)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.mlp(x).square().mean()
        return loss


def test_the_generated_code_has_the_order_of_the_schedule() -> None:
    model = Loss()
    dims = {"mlp.up.weight": 0, "mlp.up.bias": 0, "mlp.down.weight": 1}
    plan = Plan.uniform(model.named_parameters(), "replicate", world_size=2)
    plan = plan.tensor_parallel(dims, chunks=2)
    for one in compiled_step(model, torch.randn(32, 6), given=plan):
        called = [
            node.name
            for node in one.graph.nodes
            if node.target in (_aten.mm.default, _aten.addmm.default, WAIT) or is_collective(node)
        ]
        starts = [node for node in one.graph.nodes if COLLECTIVE.is_set(node)]
        assert sum(COLLECTIVE.of(node).tokens for node in starts) >= 4
        place = {
            name: number
            for number, kernel in reversed(list(enumerate(one.kernels)))
            for name in kernel.origins
            if kernel.is_operator
        }
        in_code = [place[name] for name in called]
        assert in_code == sorted(in_code), one.code
