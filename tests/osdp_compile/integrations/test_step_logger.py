"""Figures for a dashboard: those of the report, on rank 0, every few steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import osdp_compile
from osdp_compile.integrations.step_logger import StepLogger, step_figures, to_tensorboard
from tests.training import SLOW


class Writer:
    """As TensorBoard's ``SummaryWriter``."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def logged(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    options = {"hardware": SLOW, "memory_limit": "1MiB"}
    compiled = torch.compile(model, backend="osdp", options=options)
    before = step_figures(compiled)
    writer = Writer()
    logger = StepLogger(compiled, to_tensorboard(writer), every=6)
    for _ in range(13):
        compiled(torch.ones(4, 8)).sum().backward()
        logger.step()
    said = osdp_compile.report(model)
    predicted = said.predicted_step_seconds, said.predicted_peak_bytes
    return before, writer.scalars, predicted


def test_rank_0_writes_every_few_steps(two_ranks):
    (before, scalars, predicted), (_, others, _) = two_ranks.run(logged)
    assert before == {} and others == []
    assert {step for *_, step in scalars} == {6, 12}
    last = {name.removeprefix("osdp/"): value for name, value, step in scalars if step == 12}
    assert 0 < last["step_seconds"] < 10
    assert last["memory_limit_bytes"] == 1 << 20
    assert (last["predicted_step_seconds"], last["predicted_peak_bytes"]) == predicted
    assert last["predicted_wait_seconds"] > 0
    assert "peak_bytes" not in last, "on the CPU nothing measures it"


def test_every_below_one_is_refused():
    with pytest.raises(ValueError, match="every=0"):
        StepLogger(nn.Linear(1, 1), print, every=0)


def test_a_model_without_a_plan_has_no_figures():
    assert step_figures(nn.Linear(1, 1)) == {}
