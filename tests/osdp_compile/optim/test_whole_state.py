"""Optimizer state of a training without sharding, loaded into one with it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp_compile import Plan
from tests.training import SLOW, normal_batch, whole


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 4))


def step(call, optimizer, *batches):
    """A step on the mean loss of the batches."""
    sum(call(one).square().mean() for one in batches).div(len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def go_on(rank, world_size, make_optimizer, steps_before, kind):
    """Load the state of one process after ``steps_before`` steps of the sharded model, and go on.

    Returns the largest distance to the one process, and the state that is still a plain tensor of
    a sharded parameter's shape.
    """
    one, model = made(), made()
    theirs, ours = make_optimizer(one.parameters()), make_optimizer(model.parameters())
    for number in range(2):
        step(one, theirs, normal_batch(number, 0, 5))
    plan = Plan.uniform(model.named_parameters(), kind, world_size=2)
    options = {"hardware": SLOW, "plan": plan}
    compiled = torch.compile(model, backend="osdp", options=options)
    for number in range(steps_before):
        step(compiled, ours, normal_batch(number, 1, rank))
    if not steps_before:
        compiled(normal_batch(0, 1, rank)).square().mean().backward()
        ours.zero_grad()
    model.load_state_dict(one.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for number in range(2):
        step(compiled, ours, normal_batch(number, 2, rank))
        step(one, theirs, *(normal_batch(number, 2, other) for other in range(world_size)))
    plain = [
        key
        for parameter, state in ours.state.items()
        for key, value in state.items()
        if value.shape == parameter.shape and not isinstance(value, DTensor)
    ]
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return max((whole(p) - q).abs().max().item() for p, q in pairs), plain


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make_optimizer", "steps_before", "kind"),
    [(adamw, 1, "shard_regather"), (adamw, 0, "shard_keep"), (momentum, 2, "shard_regather")],
)
def test_training_goes_on_as_in_one_process(two_ranks, make_optimizer, steps_before, kind):
    for apart, plain in two_ranks.run(go_on, make_optimizer, steps_before, kind):
        assert apart < 1e-6
        assert plain == []
