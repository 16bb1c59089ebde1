"""Step time against memory: what more memory brings, and that it never takes anything."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osdp_compile import Plan
from osdp_compile.planning.frontier import frontier
from osdp_compile.planning.traced_step import predicted, trace
from passes.types.hardware import Hardware
from passes.types.hardware_presets import PRESETS
from passes.types.plan import Prediction


@dataclasses.dataclass
class Steps:
    """A step whose plans are as fast as is said: by the limit they are searched for, in bytes."""

    seconds: dict[int | None, float]

    def plan(self, ranks, hardware: Hardware, limit_bytes: int | None = None) -> Plan:
        taken = 130 if limit_bytes is None else limit_bytes
        said = Prediction(self.seconds[limit_bytes], 0.1, 0.0, taken, {"parameters": taken})
        return Plan((), world_size=2, memory_limit_bytes=limit_bytes, prediction=said)

    def least_bytes(self, ranks, hardware: Hardware) -> int:
        return 100


def test_a_plan_of_a_lower_limit_stands_where_a_higher_one_finds_none_that_is_as_fast():
    step = Steps({100: 3.0, 110: 2.0, 120: 2.5, None: 2.2})
    points = frontier(step, {"ranks": 2}, PRESETS["cpu-gloo"], points=4).points
    assert [limit for limit, _ in points] == [100, 110, 120, 130]
    assert [predicted(plan).step_seconds for _, plan in points] == [3.0, 2.0, 2.0, 2.0]
    assert [predicted(plan).peak_bytes for _, plan in points] == [100, 110, 110, 110]
    assert [plan.memory_limit_bytes for _, plan in points] == [100, 110, 110, 110]


def test_each_plan_of_the_picture_has_a_colour_of_its_own(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    curve = frontier(Steps({100: 3.0, None: 2.0}), {"ranks": 2}, PRESETS["cpu-gloo"], points=2)
    others = dict.fromkeys(("DDP", "FSDP"), curve.points[0][1])
    curve.draw(tmp_path / "frontier.png", others)
    (axes,) = drawn[0].axes
    colours = [to_hex(axes.lines[0].get_color())]
    colours += [to_hex(one.get_facecolor()[0]) for one in axes.collections]
    assert len(set(colours)) == 3


class Wide(nn.Module):
    """One layer far wider than the others."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (512, 1024, 4096, 512, 10)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return F.cross_entropy(self.layers[-1](x), targets)


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
def test_activations_are_recomputed_where_that_makes_room_for_overlap():
    """Without, the fastest plan fits there too; its collectives have less room."""
    step = trace(Wide(), (torch.randn(64, 512), torch.zeros(64, dtype=torch.long)))
    ranks, hardware = {"ranks": 4}, PRESETS["cpu-gloo"]
    limit_bytes = round(1.2 * step.least_bytes(ranks, hardware))
    plan = step.plan(ranks, hardware, limit_bytes)
    assert plan.recompute and predicted(plan).peak_bytes <= limit_bytes
    whole = step.priced(plan.replace(recompute=(), also_save=(), order={}), ranks, hardware)
    assert whole.peak_bytes <= limit_bytes
    assert predicted(plan).step_seconds < whole.step_seconds
