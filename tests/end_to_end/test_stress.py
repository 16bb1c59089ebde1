"""Many small collectives in flight for many steps: none reads or writes memory that is not its own.

A buffer that is freed or used again in flight changes a gradient now and then. So parameters
are float64, and after 200 steps they must be those of one process to the last digits.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from passes.types.decision import FLAT_DECISIONS
from tests.training import SLOW, mixed_plan

STEPS, ROWS = 200, 3
#: Sums over ranks and over a batch round differently: 1e-16 a step, grown over the steps.
TOLERANCE = 1e-10


def many_small_layers(widths: tuple[int, ...] = (13, 6, 17, 9, 21, 7, 4)) -> nn.Module:
    """20 parameters of a few hundred bytes, most of them with rows that 4 does not divide."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    before = 8
    for width in widths:
        layers += [nn.Linear(before, width), nn.Tanh()]
        before = width
        if width % 3 == 0:
            layers.append(nn.LayerNorm(width))
    return nn.Sequential(*layers).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 8, dtype=torch.float64, generator=generator)


def train(rank: int, world_size: int) -> tuple[float, float, int]:
    """How far parameters are from one process's, and how far they moved; collectives a step."""
    model = many_small_layers()
    alone, untrained = copy.deepcopy(model), copy.deepcopy(model)
    # No buckets: each travels on its own.
    plan = mixed_plan(model, list(FLAT_DECISIONS), bucket_bytes=0, world_size=world_size)
    compiled = torch.compile(model, backend="osdp", options={"plan": plan, "hardware": SLOW})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, alone)]
    for step in range(STEPS):
        compiled(batch(step, rank)).square().mean().backward()
        every = torch.cat([batch(step, other) for other in range(world_size)])
        alone(every).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    pairs = list(zip(trained, alone.parameters(), untrained.parameters(), strict=True))
    apart = max((a - b).abs().max().item() for a, b, _ in pairs)
    moved = min((b - c).abs().max().item() for _, b, c in pairs)
    return apart, moved, len(plan.parameters)


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_four_ranks_train_200_steps_with_many_small_collectives_in_flight(four_ranks):
    for apart, moved, parameters in four_ranks.run(train):
        assert parameters == 20
        assert moved > 1e-3, "nothing was trained: the comparison shows nothing"
        assert apart < TOLERANCE
