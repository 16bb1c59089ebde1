"""A forward that writes into a parameter: an error that names it, never a write that is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdp_compile import OsdpError, Plan
from tests.chosen import thorough
from tests.training import SLOW, normal_batch


class Scaled(nn.Module):
    """A linear whose results are scaled; ``write`` changes the scale in the forward."""

    def __init__(self, write):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 4), nn.Parameter(torch.full((4,), 0.5))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.write(self, y.detach())
        return (y * self.scale).square().mean()


def nothing(model, y):
    pass


def data_in_place(model, y):
    model.scale.data.copy_(y.std(0))


def without_gradients(model, y):
    with torch.no_grad():
        model.scale.clamp_(0.1, 0.2)


def a_row(model, y):
    with torch.no_grad():
        model.linear.weight[1] = 1.0


def new_data(model, y):
    model.scale.data = y.std(0)


@torch.compiler.disable
def reads_in_python(model, y):
    scale = model.scale.detach().clone()
    scale.clamp_(0.1, 0.2)


class Words(nn.Module):
    """An embedding that shortens the vectors of the words that it looks up, in place."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(12, 8, max_norm=0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.table((x.abs() * 4).long())).square().mean()


def options_for(model: nn.Module, kind: str):
    plan = Plan.uniform(model.named_parameters(), kind, world_size=2)
    return {"hardware": SLOW, "plan": plan}


def called(model: nn.Module, options, rank: int, trains: bool = True) -> str:
    """The text of the error; empty: there is none."""
    compiled = torch.compile(model, backend="osdp", options=options)
    try:
        with torch.set_grad_enabled(trains):
            loss = compiled(normal_batch(0, 0, rank))
        if trains:
            loss.backward()
    except OsdpError as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return ""


def errors(rank, world_size, write, kind):
    model = Words() if write is None else Scaled(write)
    return called(model, options_for(model, kind), rank)


@pytest.mark.parametrize("kind", ["replicate", "shard_regather"])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (data_in_place, "scale"),
        (a_row, "linear.weight"),
        (new_data, "scale"),
        *thorough((without_gradients, "scale"), (None, "table.weight")),
    ],
)
def test_a_write_is_refused_by_name(two_ranks, write, name, kind):
    for text in two_ranks.run(errors, write, kind):
        assert f"the forward writes into parameter {name!r}" in text


@torch.compiler.disable
def left_to_python(model, y):
    with torch.no_grad():
        model.scale.clamp_(0.1, 0.2)


def after_a_graph_break(model, y):
    scale = model.scale
    torch._dynamo.graph_break()
    with torch.no_grad():
        scale.clamp_(0.1, 0.2)


@torch.compiler.disable
def shortened_rows(model, y):
    F.embedding(torch.tensor([1]), model.linear.weight, max_norm=0.1)


def errors_of_the_step(rank, world_size, write, kind):
    """The text of the error of two steps; empty: there is none."""
    model = nn.Sequential(nn.Linear(8, 8), Scaled(write))
    compiled = torch.compile(model, backend="osdp", options=options_for(model, kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = ""
    try:
        for step in range(2):
            compiled(normal_batch(step, 0, rank)).backward()
            optimizer.step()
    except OsdpError as error:
        said = str(error)
    finally:
        torch._dynamo.reset()
    return said


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (left_to_python, "1.scale"),
        (after_a_graph_break, "1.scale"),
        (shortened_rows, "1.linear.weight"),
    ],
)
def test_a_write_in_code_left_to_python_is_refused_too(two_ranks, write, name):
    for text in two_ranks.run(errors_of_the_step, write, "shard_regather"):
        assert f"the forward writes into parameter {name!r}" in text


def test_a_model_that_only_reads_in_such_code_trains(two_ranks):
    assert two_ranks.run(errors_of_the_step, reads_in_python, "shard_regather") == ["", ""]


def evaluated(rank, world_size):
    """The first call trains and does not write; the evaluation writes."""
    model = Scaled(lambda model, y: model.training or data_in_place(model, y))
    options = options_for(model, "shard_keep")
    trained = called(model, options, rank)
    return trained, called(model.eval(), options, rank, trains=False)


def test_a_write_in_an_evaluation_is_refused_too(two_ranks):
    for trained, evaluation in two_ranks.run(evaluated):
        assert trained == "" and "the forward writes into parameter 'scale'" in evaluation
