"""Steps of several graphs: breaks in submodules, eager layers, blocks compiled one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import osdp_compile
from tests.chosen import core, more, others
from tests.training import (
    SLOW,
    Recipe,
    trains_like_reference,
)


class Inner(nn.Module):
    """Stops Dynamo between two layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return self.b(x)


class BrokenInside(nn.Module):
    """The submodule's frames are compiled by themselves, before the rest of this one's."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.inner(x)
        return self.head(x)


class BrokenInArgument(BrokenInside):
    def forward(self, x):
        return self.head(self.inner(x))


class BrokenAfter(BrokenInside):
    """The outer frame begins before the break."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.inner(torch.tanh(self.first(x))))


CLIPPED = Recipe(max_norm=0.05, steps=4)


_BROKEN = [
    (BrokenInArgument, "shard_keep"),
    (BrokenAfter, "shard_regather"),
    (BrokenInside, "replicate"),
]
_MODELS = (BrokenInside, BrokenInArgument, BrokenAfter)
_PLANS = ("replicate", "shard_keep", "shard_regather", 0.5)
_OTHERS = others(product(_MODELS, _PLANS), _BROKEN)


@pytest.mark.parametrize(
    ("model", "plan"),
    [*core(_BROKEN, _BROKEN[-1]), *_OTHERS],
)
def test_a_graph_break_inside_a_submodule(two_ranks, model, plan):
    outcome = trains_like_reference(two_ranks, model, plan, CLIPPED)
    if plan in ("shard_keep", "shard_regather"):
        assert set(outcome.placements.values()) == {"shard"}


def nested(model, batch):
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        return model(batch).float().square().mean()


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "nested_graph_breaks"), reason="torch has no such option"
)
@pytest.mark.parametrize("plan", ["shard_regather", *more("replicate")])
def test_breaks_that_dynamo_nests(two_ranks, plan):
    recipe = Recipe(step=nested, max_norm=0.05)
    trains_like_reference(two_ranks, BrokenAfter, plan, recipe)


class EagerFirst(nn.Module):
    """Eager code reads parameters before anything is compiled, and after."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.inner = Inner()
        self.after = nn.Linear(8, 4)

    @torch.compiler.disable
    def eager(self, layer, x):
        return torch.tanh(layer(x))

    def forward(self, x):
        x = self.eager(self.before, x)
        x = self.inner(x)
        return self.eager(self.after, x)


@pytest.mark.parametrize("plan", ["shard_regather", *more("replicate")])
def test_layers_that_run_before_anything_is_compiled(two_ranks, plan):
    trains_like_reference(two_ranks, EagerFirst, plan, CLIPPED)


class Asks(nn.Module):
    """Python asks for a value, which fake tensors do not have."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.steps = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        x = self.a(x)
        self.steps += 1
        if x.sum().item() > 1e9:
            return x
        return self.b(x)


def test_a_model_that_asks_for_values(two_ranks):
    outcome = trains_like_reference(two_ranks, Asks, "shard_regather", CLIPPED)
    assert outcome.osdp.buffers["steps"] == 4, "tracing the step counts as none"


def doubled(x):
    """A frame of its own that reads no parameter."""
    torch._dynamo.graph_break()
    return torch.tanh(x) * 2


class AsksAndCalls(Asks):
    def forward(self, x):
        return doubled(super().forward(x))


@pytest.mark.thorough
def test_frames_without_parameters_are_compiled_again_after_the_step_is_traced(two_ranks):
    trains_like_reference(two_ranks, AsksAndCalls, "shard_regather", CLIPPED)


class BrokenWide(nn.Module):
    """Two wide halves, a break in the first and one between them."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList(BrokenHalf() for _ in range(2))

    def forward(self, x):
        for half in self.halves:
            x = half(x)
        return x


class BrokenHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x):
        x = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.down(x))


def peak_under_a_limit(rank, world_size, share):
    """Several steps at so many times the least limit: its bytes, and those that were measured."""
    torch._dynamo.reset()

    def step(options):
        torch.manual_seed(0)
        batch = torch.randn(256, 128)
        model = BrokenWide()
        optimizer = torch.optim.AdamW(model.parameters())
        compiled = torch.compile(model, backend="osdp", options={"hardware": SLOW, **options})
        for _ in range(3):
            compiled(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return osdp_compile.plan_of(model)

    with pytest.raises(osdp_compile.InfeasibleLimit) as infeasible:
        step({"memory_limit": 1 << 20})
    limit_bytes = round(share * infeasible.value.least_bytes)
    del infeasible  # it keeps the model that did not fit, which would count beside the next
    torch._dynamo.reset()
    with osdp_compile.PeakMemory() as memory:
        plan = step({"memory_limit": limit_bytes})
    torch._dynamo.reset()
    return memory.peak_bytes, plan.prediction.peak_bytes, limit_bytes


@pytest.mark.inductor
@pytest.mark.thorough
def test_a_broken_step_keeps_its_limit(two_ranks):
    for peak_bytes, predicted_bytes, limit_bytes in two_ranks.run(peak_under_a_limit, 1.1):
        assert predicted_bytes <= limit_bytes
        assert peak_bytes <= limit_bytes, (peak_bytes, predicted_bytes)
        assert peak_bytes >= 0.85 * predicted_bytes


def offline_and_first_call(rank, world_size):
    """A broken model's plan without the machine, and the one that the first call makes."""
    torch._dynamo.reset()
    with torch.device("meta"):
        offline = osdp_compile.plan(
            BrokenInside(), (torch.empty(4, 8),), world_size=world_size, hardware=SLOW
        )
    torch._dynamo.reset()
    model = BrokenInside()
    compiled = torch.compile(model, backend="osdp", options={"hardware": SLOW})
    compiled(torch.randn(4, 8)).sum().backward()
    torch._dynamo.reset()
    first = osdp_compile.plan_of(model)
    decided = [
        {row.name: row.decision.name for row in plan.parameters} for plan in (offline, first)
    ]
    return decided, offline.prediction.peak_bytes, first.prediction.peak_bytes


@pytest.mark.thorough
def test_a_broken_model_is_planned_without_the_machine_as_at_the_first_call(two_ranks):
    for (offline, first), offline_bytes, first_bytes in two_ranks.run(offline_and_first_call):
        assert offline == first and "inner.b.weight" in offline
        # The first call gathers by messages, as gloo does, and the profile does not say so.
        assert offline_bytes == pytest.approx(first_bytes, rel=0.01)
