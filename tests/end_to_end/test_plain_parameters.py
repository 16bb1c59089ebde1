"""A plan that shards nothing leaves the parameters what they are: plain tensors, as DDP does."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import osdp_compile
from osdp_compile.planning.traced_step import predicted, trace
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.training import SLOW, normal_batch


def two_layers():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def compiled_with(model, decision, world_size):
    plan = Plan.uniform(model.named_parameters(), decision, world_size=world_size)
    return torch.compile(model, backend="osdp", options={"plan": plan, "hardware": SLOW})


def first_step(rank, world_size, decision):
    """Whether objects and state dict stay, and how far gradients are from those of all ranks."""
    model = two_layers()
    reference = copy.deepcopy(model)
    for other in range(world_size):  # before the model is compiled every rank has its own
        (reference(normal_batch(0, 0, other)).square().mean() / world_size).backward()
    model(normal_batch(0, 0, rank)).square().mean().backward()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = compiled_with(model, decision, world_size)
    for other in range(world_size):
        (reference(normal_batch(1, 0, other)).square().mean() / world_size).backward()
    call(normal_batch(1, 0, rank)).square().mean().backward()
    after = dict(model.named_parameters())
    if decision != "replicate":
        return all(after[name] is not before[name] for name in before)
    torch.testing.assert_close(
        [p.grad for p in after.values()], [p.grad for p in reference.parameters()]
    )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(one is other for one, other in zip(held, after.values(), strict=True))
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}
    return all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("decision", ["replicate", "shard_regather"])
def test_parameters_are_new_objects_only_where_something_is_sharded(two_ranks, decision):
    assert two_ranks.run(first_step, decision) == [True, True]


def replace_them(rank, world_size):
    """Compile again, for another batch size, with other parameters in their place."""
    model = two_layers()
    call = compiled_with(model, "replicate", world_size)
    call(normal_batch(0, 0, rank)).square().mean().backward()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(osdp_compile.OsdpError) as raised:
        call(torch.cat([normal_batch(0, 0, rank)] * 3)).square().mean().backward()
    return str(raised.value)


def test_a_graph_with_replaced_parameters_is_refused_by_name(two_ranks):
    for text in two_ranks.run(replace_them):
        assert "parameter '0.weight' was replaced" in text and "assign=True" in text


def test_an_optimizers_step_on_plain_parameters_is_priced_as_one():
    hardware = dataclasses.replace(
        SLOW, update_seconds_per_parameter=3e-4, update_seconds_per_plain_parameter=1e-4
    )
    step, ranks, seconds = trace(two_layers(), (normal_batch(0, 0, 0),)), {"ranks": 2}, {}
    for decision in (Decision.REPLICATE, Decision.SHARD_KEEP):
        dear, cheap = (
            predicted(step.uniform(decision, ranks, one)).step_seconds for one in (hardware, SLOW)
        )
        seconds[decision] = dear - cheap
    assert seconds == pytest.approx({Decision.REPLICATE: 4e-4, Decision.SHARD_KEEP: 12e-4})
