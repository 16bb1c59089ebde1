"""Budget figures: those of the prediction; a small text that reads back and is always the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from osdp_compile.planning import traced_step
from osdp_compile.planning.offline import offline_step
from osdp_compile.planning.traced_step import predicted
from osdp_compile.reports.budget_figures import BudgetFigures, budget_figures
from tests.training import SLOW

pytestmark = pytest.mark.usefixtures("short_search")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def figures(layers: int = 3, **options: Any) -> BudgetFigures:
    given = {"world_size": 8, "hardware": SLOW, **options}
    step = offline_step(Deep(layers), (torch.ones(16, 64),), **given)
    return budget_figures(step, step.plan())


@pytest.fixture(scope="module")
def three_layers() -> BudgetFigures:
    return figures()


def test_they_are_those_of_the_prediction():
    step = offline_step(Deep(3), (torch.ones(16, 64),), world_size=8, hardware=SLOW)
    plan = step.plan()
    found, prediction = budget_figures(step, plan), predicted(plan)
    assert found.peak_bytes == prediction.peak_bytes == sum(found.peak.values())
    assert found.step_seconds == pytest.approx(prediction.step_seconds, abs=1e-9)
    assert list(found.phases) == ["forward", "backward", "optimizer"]
    for name in ("compute_seconds", "exposed_seconds"):
        seconds = sum(getattr(phase, name) for phase in found.phases.values())
        assert seconds == pytest.approx(getattr(prediction, name), abs=1e-8)
    between_steps = sum(found.peak.get(kind, 0) for kind in ("parameters", "optimizer", "inputs"))
    held = between_steps + found.peak.get("returned", 0)
    assert sum(found.buffers.values()) == found.peak_bytes - held
    assert found.parameters["blocks.2.up.weight"].size_bytes == 64 * 256 * 4
    assert found.parameters["blocks.2.up.weight"].form == "256x64 float32"


def test_a_tensor_at_the_peak_is_named_by_its_module(three_layers):
    relu = "blocks.1: saved for the backward, activations"
    assert three_layers.buffers[relu] >= 16 * 256 * 4


def test_the_text_reads_back_and_alike_entries_are_one(three_layers):
    text = three_layers.to_text()
    assert BudgetFigures.from_text(text) == three_layers
    assert '"blocks.{0..2}.up.weight": {"form": "256x64 float32", "size_bytes": 65536' in text
    assert len(text.splitlines()) < 50


def test_the_text_is_the_same_in_every_run(three_layers):
    assert figures().to_text() == three_layers.to_text()


def test_the_settings_are_in_it():
    found = figures(1, world_size=None, mesh={"gpu": 4}, memory_limit="2MiB")
    assert found.settings["ranks"] == "4"
    assert found.settings["memory limit"] == "2 MiB"
    assert found.settings["hardware"] == "slow network"
    assert torch.__version__.startswith(found.settings["torch"])


def test_layers_that_the_simulation_lacks_are_named():
    with mock.patch.object(traced_step, "_MOST_NODES", 60):
        found = figures(14, memory_limit="2MiB")
    (left_out,) = (name for name in found.buffers if name.startswith("the layers left out"))
    assert left_out == "the layers left out: saved for the backward, activations"
    assert BudgetFigures.from_text(found.to_text()) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("peak_bytes"), "peak_bytes"),
        (lambda data: data.update(more=1), "more"),
        (lambda data: data.update(format=2), "no budget figures of format 1 .found 2"),
        (lambda data: data["peak"].update(activations="much"), r"peak"),
        (lambda data: data.update(step_seconds=0.0), "not above zero"),
    ],
)
def test_other_texts_are_refused(three_layers, change, message):
    data = json.loads(three_layers.to_text())
    change(data)
    with pytest.raises(ValueError, match=message):
        BudgetFigures.from_text(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_text_that_is_no_object_is_refused(text):
    with pytest.raises(ValueError):
        BudgetFigures.from_text(text)


def test_seconds_are_kept_to_the_nanosecond(three_layers):
    changed = dataclasses.replace(three_layers, step_seconds=0.123456789)
    assert BudgetFigures.from_text(changed.to_text()).step_seconds == 0.123456789
