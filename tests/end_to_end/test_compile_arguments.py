"""Arguments of torch.compile, and stances: they mean what they mean with backend="inductor"."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from osdp_compile import Plan
from osdp_compile.engine import backend
from tests.chosen import more
from tests.end_to_end.test_dynamic_shapes import Language, sentences
from tests.training import SLOW

LENGTHS = (6, 9, 12, 15)


def compiled_language(world_size, **arguments):
    """A compiled model on its plan, and the model in eager mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Language()
    plan = Plan.uniform(model.named_parameters(), "shard_keep", world_size=world_size)
    eager = copy.deepcopy(model)
    options = {"plan": plan, "hardware": SLOW}
    return torch.compile(model, backend="osdp", options=options, **arguments), eager


def step(compiled, eager, words):
    """A forward and a backward; whether the loss is that of eager mode."""
    loss = compiled(words)
    loss.backward()
    return torch.allclose(loss, eager(words), atol=1e-5)


def counted(work):
    """The result of a function, and the number of graphs that it compiled."""
    with mock.patch.object(backend, "lower", wraps=backend.lower) as lower:
        return work(), lower.call_count


def lengths_of_a_dynamic_graph(rank, world_size, how):
    compiled, eager = compiled_language(world_size, fullgraph=True, dynamic=how == "all" or None)

    def run(length):
        words = sentences(length, rank)
        if how == "marked":
            torch._dynamo.mark_dynamic(words, 1)
        return step(compiled, eager, words)

    first = counted(lambda: run(LENGTHS[0]))
    with torch.compiler.set_stance("fail_on_recompile"):
        others = counted(lambda: all(run(length) for length in LENGTHS[1:]))
    return first, others


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["all", *more("marked")])
def test_a_new_length_within_a_dynamic_graph_does_not_compile_again(two_ranks, how):
    for first, others in two_ranks.run(lengths_of_a_dynamic_graph, how):
        assert first == (True, 1)
        assert others == (True, 0)


def a_new_length_of_a_static_graph(rank, world_size, stance):
    compiled, eager = compiled_language(world_size, dynamic=False)
    assert step(compiled, eager, sentences(6, rank))
    with torch.compiler.set_stance(stance):
        return counted(lambda: step(compiled, eager, sentences(9, rank)))


@pytest.mark.thorough
@pytest.mark.parametrize("stance", ["default", "eager_on_recompile", *more("force_eager")])
def test_a_stance_says_what_a_new_length_does(two_ranks, stance):
    for found in two_ranks.run(a_new_length_of_a_static_graph, stance):
        assert found == (True, int(stance == "default"))


def fails_on_a_new_length(rank, world_size):
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        a_new_length_of_a_static_graph(rank, world_size, "fail_on_recompile")


@pytest.mark.thorough
def test_a_stance_refuses_to_compile_a_new_length(two_ranks):
    two_ranks.run(fails_on_a_new_length)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x).sum()


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(8, 8)

    def forward(self, x):
        return (self.rows(x) * torch.arange(32.0).view(4, 8)).sum()


def refused(model, mark=False, **arguments):
    """The type and the first line of the error that the first call ends with."""
    x = torch.ones(4, 8)
    if mark:
        torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    with pytest.raises(Exception) as error:
        torch.compile(model, **arguments)(x).backward()
    return type(error.value).__name__, str(error.value).split("\n")[0]


def refused_by_both(rank, world_size):
    options = {"hardware": SLOW}
    for given in ({"fullgraph": True}, {"mark": True}):
        found = [
            refused(model, **given, backend=one, options=own)
            for one, own in (("osdp", options), ("inductor", None))
            for model in [Breaks() if "fullgraph" in given else Constant()]
        ]
        assert found[0] == found[1], found
    return found[0]


@pytest.mark.thorough
def test_what_dynamo_refuses_is_refused_as_with_inductor(two_ranks):
    """A graph break with fullgraph=True, and a dynamic size that the model makes a constant."""
    for kind, _ in two_ranks.run(refused_by_both):
        assert kind == "ConstraintViolationError"
