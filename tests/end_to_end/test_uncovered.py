"""Every way in which Dynamo leaves a trained parameter out: refused by name, or trained right."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import osdp_compile
from tests.training import (
    Recipe,
    mean_over_ranks,
    normal_batch,
    plan_options,
    sgd,
    trains_like_reference,
    whole,
)


class LanguageModel(nn.Module):
    """Dynamo skips a frame that calls an nn.LSTM, or breaks the graph there, as in torch 2.15."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        ids = (x.abs() * 10).long() % 16
        return self.head(self.lstm(self.embed(ids))[0])


class TwoLayers(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Disabled(TwoLayers):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class PartlyOutside(nn.Module):
    """Its head is read by the training script, beside the compiled body."""

    def __init__(self):
        super().__init__()
        self.body = TwoLayers()
        self.head = nn.Linear(4, 2)


def _step(call, optimizer, rank, step=0):
    loss = call(normal_batch(step, 0, rank)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _compiled(model, world_size):
    options = plan_options(model, "shard_regather", Recipe(), world_size)
    return torch.compile(model, backend="osdp", options=options)


def skipped_frame(rank, world_size):
    """What a step of it is refused with; None: it is not."""
    model = LanguageModel()
    try:
        _step(_compiled(model, world_size), sgd(model.parameters()), rank)
    except osdp_compile.OsdpError as refused:
        return str(refused)
    return None


def disabled_function(rank, world_size):
    model = Disabled()
    _step(_compiled(model, world_size), sgd(model.parameters()), rank)


def forced_eager(rank, world_size):
    model = TwoLayers()
    compiled = _compiled(model, world_size)
    with torch.compiler.set_stance("force_eager"):
        _step(compiled, sgd(model.parameters()), rank)


def recompile_limit(rank, world_size):
    model = TwoLayers()
    compiled = _compiled(model, world_size)
    with torch._dynamo.config.patch(
        recompile_limit=1, automatic_dynamic_shapes=False, assume_static_by_default=True
    ):
        for rows in (1, 2, 3):  # evaluation uses them up
            with torch.no_grad():
                compiled(torch.randn(rows, 8))
        _step(compiled, sgd(model.parameters()), rank)


def suppressed_error(rank, world_size):
    model = TwoLayers()
    compiled = torch.compile(model, backend="osdp", options={"memory_limit": 1 << 10})
    with torch._dynamo.config.patch(suppress_errors=True):
        _step(compiled, sgd(model.parameters()), rank)


def function_without_graphs(rank, world_size):
    model = Disabled()
    step = torch.compile(lambda x: model(x), backend="osdp")
    _step(step, sgd(model.parameters()), rank)


def head_in_the_script(rank, world_size):
    model = PartlyOutside()
    body = _compiled(model.body, world_size)
    _step(lambda x: model.head(body(x)), sgd(model.parameters()), rank)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (disabled_function, "0.weight"),
        (forced_eager, "0.weight"),
        (recompile_limit, "0.weight"),
        (suppressed_error, "0.weight"),
        (function_without_graphs, "0.weight"),
        (head_in_the_script, "weight"),
    ],
)
def test_what_no_graph_covers_is_refused_by_name(two_ranks, way, name):
    for text in two_ranks.run(_refused, way):
        _names(name, text)


def test_a_frame_that_dynamo_skips_is_refused_and_one_that_it_breaks_trains_right(two_ranks):
    first, second = two_ranks.run(skipped_frame)
    assert first == second
    if first is None:
        trains_like_reference(two_ranks, LanguageModel, "shard_regather")
    else:
        _names("embed.weight", first)


def _names(parameter: str, text: str) -> None:
    assert f"parameter {parameter!r} (and " in text, text
    assert "no graph that was compiled with backend='osdp' reads it" in text
    assert "allow_rnn" in text and "force_eager" in text


def _refused(rank, world_size, way):
    torch._dynamo.reset()
    with pytest.raises(osdp_compile.OsdpError) as refused:
        way(rank, world_size)
    torch._dynamo.reset()
    return str(refused.value)


def train_and_leave_out_later(rank, world_size, stance):
    """The first call compiles; later steps run in eager mode. Differences to one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TwoLayers()
    reference = copy.deepcopy(model)
    compiled = _compiled(model, world_size)
    optimizer, other = sgd(model.parameters()), sgd(reference.parameters())
    differences = []
    for step in range(4):
        with torch.compiler.set_stance(stance if step else "default"):
            rows = 4 + step  # another shape each time
            batch = torch.cat([normal_batch(step, micro, rank) for micro in range(2)])[:rows]
            loss = compiled(batch).square().mean()
        loss.backward()
        total = 0.0
        for one in range(world_size):
            batch = torch.cat([normal_batch(step, micro, one) for micro in range(2)])[:rows]
            part = reference(batch).square().mean() / world_size
            part.backward()
            total += part.item()
        differences.append(mean_over_ranks(loss) - total)
        for used in (optimizer, other):
            used.step()
            used.zero_grad()
    differences += [
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    torch._dynamo.reset()
    return max(map(abs, differences))


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_eager_steps_after_the_first_call_are_right(two_ranks, stance):
    assert max(two_ranks.run(train_and_leave_out_later, stance)) < 1e-5


def train_another_model(rank, world_size):
    """A model that osdp does not know, beside one that it does: none of its business."""
    model, other = TwoLayers(), TwoLayers()
    compiled = _compiled(model, world_size)
    _step(compiled, sgd(model.parameters()), rank)
    _step(other, sgd(other.parameters()), rank)
    return True


def test_another_model_with_its_own_optimizer_is_left_alone(two_ranks):
    assert two_ranks.run(train_another_model) == [True, True]


def compile_the_step(rank, world_size):
    """Whether Dynamo traced the check of a compiled optimizer step, for each object looked at."""
    model, other = TwoLayers(), TwoLayers()
    compiled = _compiled(model, world_size)
    _step(compiled, sgd(model.parameters()), rank)
    traced = []

    def backend_of_compiled(_):
        traced.append(torch.compiler.is_dynamo_compiling())

    optimizer = sgd(other.parameters())
    optimizer.step = torch.compile(optimizer.step)
    with mock.patch("osdp_compile._torch.dynamo.backend_of_compiled", backend_of_compiled):
        _step(other, optimizer, rank)
    return set(traced)


def test_a_compiled_step_does_not_trace_the_check(two_ranks):
    assert two_ranks.run(compile_the_step) == [{False}, {False}]
