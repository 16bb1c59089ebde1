"""A step as text: equal for equal steps, another for each difference, refused where uncertain."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from osdp_compile.planning.step_key import Uncertain, captured_lines, dynamo_lines, text_of
from osdp_compile.planning.traced_step import trace


def lines_of(model, batch, dynamic=False):
    """The text of the model's Dynamo graph, or why there is none."""
    found = []

    def backend(gm, inputs):
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        names = {i: own[id(one)] for i, one in enumerate(inputs) if id(one) in own}
        try:
            found.append(dynamo_lines(gm, inputs, names))
        except Uncertain as why:
            found.append(str(why))
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=dynamic)(batch)
    (lines,) = found
    return lines


class Mlp(nn.Module):
    def __init__(self, width=8, function=torch.relu):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.up(x))).sum()


def test_equal_steps_have_equal_text():
    first = lines_of(Mlp(), torch.ones(2, 8))
    assert isinstance(first, list) and first == lines_of(Mlp(), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Mlp(16), torch.ones(2, 8)),
        (Mlp(function=torch.tanh), torch.ones(2, 8)),
        (Mlp(), torch.ones(4, 8)),
        (Mlp(), torch.ones(8, 2).t()),
        (Mlp(), torch.ones(2, 8, requires_grad=True)),
        (Mlp().requires_grad_(False), torch.ones(2, 8)),
        (Mlp().bfloat16(), torch.ones(2, 8, dtype=torch.bfloat16)),
    ],
)
def test_other_models_and_batches_have_other_text(model, batch):
    other = lines_of(model, batch)
    assert isinstance(other, list) and other != lines_of(Mlp(), torch.ones(2, 8))


def test_other_settings_of_torch_have_other_text():
    first = lines_of(Mlp(), torch.ones(2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert lines_of(Mlp(), torch.ones(2, 8)) != first
    with torch._inductor.config.patch(pattern_matcher=False):
        assert lines_of(Mlp(), torch.ones(2, 8)) != first


@torch.library.custom_op("osdp_step_key::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda ctx, gradient: gradient * 2)


def recomputed(x):
    return checkpoint(torch.relu, x, use_reentrant=False)


@pytest.mark.parametrize(("function", "cause"), [(double, "double"), (recomputed, "get_attr")])
def test_operators_and_regions_of_users_are_uncertain(function, cause):
    assert cause in lines_of(Mlp(function=function), torch.ones(2, 8))


def test_symbolic_sizes_and_subclasses_are_uncertain():
    assert "type" in lines_of(Mlp(), torch.ones(3, 8), dynamic=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert isinstance(lines_of(Mlp(), torch.ones(2, 8)), str)


def test_text_without_an_address():
    assert text_of({"a": 1.5}) == "{'a': 1.5}"
    with pytest.raises(Uncertain):
        text_of(object())


def test_captured_steps():
    first, again, larger = (
        captured_lines(trace(Mlp(width), (torch.ones(2, 8),)).captured) for width in (8, 8, 16)
    )
    assert first == again != larger
    captured = trace(Mlp(function=double), (torch.ones(2, 8),)).captured
    assert any("osdp_step_key.double" in line for line in captured_lines(captured))
    assert captured_lines(dataclasses.replace(captured, border_bytes=1)) != captured_lines(captured)
