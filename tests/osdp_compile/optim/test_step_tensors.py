"""Temporary tensors of optimizers' steps, measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from osdp_compile import PeakMemory
from osdp_compile.model.model_parameters import model_parameters
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.optim.state_sizes import known_optimizers
from osdp_compile.optim.step_tensors import step_tensors_in, step_tensors_of
from osdp_compile.planning.planner_inputs import described
from passes.types.context import StepTensors

SHARD_BYTES, PARAMETERS = 1 << 18, 16
DECAY = {"weight_decay": 0.1}
CLASSES = [
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
    *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
]
OPTIONS = [
    *((one, {}) for one in CLASSES),
    *((one, DECAY) for one in CLASSES if one is not torch.optim.Rprop),
    *((one, {"maximize": True}) for one in CLASSES),
    *((one, {"amsgrad": True}) for one in (torch.optim.Adam, torch.optim.AdamW)),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, **DECAY}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, **DECAY}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
]


def measured_tensors(kind, foreach, options):
    """The peak of a third step, in tensors of a parameter's size; and what is said of it."""
    parameters = [nn.Parameter(torch.randn(SHARD_BYTES // 4)) for _ in range(PARAMETERS)]
    optimizer = kind(parameters, lr=1e-3, foreach=foreach, **options)
    for one in parameters:
        one.grad = torch.randn_like(one)
    optimizer.step()
    optimizer.step()
    with PeakMemory() as memory:
        optimizer.step()
    said = step_tensors_in(kind.__name__, optimizer.param_groups[0])
    return memory.peak_bytes / SHARD_BYTES, said


def named(value):
    return value.__name__ if isinstance(value, type) else "-".join(value) or "plain"


@pytest.mark.parametrize("kind, options", OPTIONS, ids=named)
def test_a_step_makes_no_more_tensors_than_said(kind, options):
    one_by_one, said = measured_tensors(kind, None if "fused" in options else False, options)
    assert said.foreach is False
    assert one_by_one <= said.one_by_one + 0.01
    if "fused" in options:
        assert said == StepTensors(3, 0, False)
        return
    at_once, said = measured_tensors(kind, True, options)
    assert said.foreach is True
    assert said.at_once - 1 <= at_once / PARAMETERS <= said.at_once + 0.01


def test_every_known_optimizer_has_its_tensors():
    for name in known_optimizers():
        assert step_tensors_of(name).foreach is (False if name == "muon" else None)


def test_the_live_optimizers_count():
    model = nn.Linear(4, 4, bias=False)
    (entry,) = model_parameters([("", model)])
    index = OptimizerIndex([entry.parameter])
    assert described(entry, index, None).step_tensors == StepTensors()
    first = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    index = OptimizerIndex([entry.parameter])
    assert described(entry, index, None).step_tensors == StepTensors(3, 0, True)
    second = torch.optim.AdamW(model.parameters())
    index = OptimizerIndex([entry.parameter])
    assert described(entry, index, None).step_tensors == StepTensors(3, 1, True)
    assert described(entry, index, "radam").step_tensors == StepTensors(3, 1, None)
    assert described(entry, index, 8).step_tensors == StepTensors()
    del first, second


class Theirs(torch.optim.Optimizer):
    """An optimizer of another library."""


def test_an_unknown_optimizer_steps_one_by_one():
    optimizer = Theirs([nn.Parameter(torch.zeros(2))], {"lr": 0.1})
    said = step_tensors_in("Theirs", optimizer.param_groups[0])
    assert said == StepTensors(3, 1, False)
