"""A backward through a backward, as of a gradient penalty: torch.compile has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from osdp_compile import OsdpError
from tests.training import Recipe, normal_batch, plan_options, trains_like_reference


def two_layers():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def slope_with_graph(model, batch):
    """A gradient with a graph that nobody goes through, and the mean square."""
    batch = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return model(batch.detach()).square().mean() + slope.detach().square().mean()


def penalise_twice(rank, world_size):
    """Train with a penalty on the gradient's size; the errors of two steps."""
    model = two_layers()
    options = plan_options(model, "shard_regather", Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    batch = normal_batch(0, 0, rank).requires_grad_()
    errors = []
    for _ in range(2):
        (slope,) = torch.autograd.grad(compiled(batch).sum(), batch, create_graph=True)
        with pytest.raises(OsdpError) as raised:
            slope.square().mean().backward()
        errors.append(str(raised.value))
    return errors


def test_a_gradient_penalty_is_refused_with_what_to_do(two_ranks):
    for errors in two_ranks.run(penalise_twice):
        for error in errors:
            assert "create_graph=True" in error
            assert "uncompiled, in DistributedDataParallel" in error


def test_a_graph_that_nobody_goes_through_is_no_reason_to_refuse(two_ranks):
    trains_like_reference(two_ranks, two_layers, "shard_regather", Recipe(step=slope_with_graph))
