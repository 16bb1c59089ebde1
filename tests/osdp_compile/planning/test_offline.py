"""Plans made without a process group, on models without memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

import osdp_compile
from examples.gpt import GPT, GPTConfig
from osdp_compile import Decision, InfeasibleLimit, OsdpError, Plan
from osdp_compile.planning.offline import offline_step
from osdp_compile.planning.traced_step import predicted, trace
from osdp_compile.trace import fake_world
from osdp_compile.tracking.session import session_for
from passes.types.hardware import generic
from tests.boxed import without_inductor
from tests.chosen import thorough
from tests.training import SLOW

pytestmark = pytest.mark.usefixtures("short_search")

SMALL = GPTConfig(vocab=61, layers=1, width=64, heads=2, context=12)


def batch(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(rows * 13).reshape(rows, 13) % SMALL.vocab
    return tokens[:, :-1], tokens[:, 1:]


def on_meta() -> GPT:
    with torch.device("meta"):
        return GPT(SMALL)


def first_call_plan(model: nn.Module, args, world_size: int, **options) -> Plan:
    """What the backend itself decides at its first call."""
    with fake_world(world_size), without_inductor():
        compiled = torch.compile(
            model, backend="osdp", options={"hardware": SLOW, "optimizer": "adamw", **options}
        )
        compiled(*args)
        found = osdp_compile.plan_of(model)
    torch._dynamo.reset()
    assert found is not None
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [None, "400KiB"])
def test_the_plan_is_that_of_the_first_call(limit):
    options = {} if limit is None else {"memory_limit": limit}
    offline = osdp_compile.plan(on_meta(), batch(), world_size=8, hardware=SLOW, **options)
    assert offline == first_call_plan(GPT(SMALL), batch(), 8, **options)
    assert offline.prediction is not None
    assert (limit is None) == (offline.memory_limit_bytes is None)


class Narrow(nn.Module):
    """Two layers, quick to plan."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


@pytest.mark.thorough
def test_a_thorough_plan_is_that_of_the_first_call_which_schedules_for_its_rung():
    x = torch.ones(8, 64)
    limit_bytes = round(1.04 * trace(Narrow(), (x,)).least_bytes({"ranks": 8}, SLOW)) | 1  # no rung
    given = {"hardware": SLOW, "memory_limit": limit_bytes, "search": "thorough"}
    offline = osdp_compile.plan(Narrow(), (x,), world_size=8, **given)
    assert offline.memory_limit_bytes < limit_bytes
    model = Narrow()
    with fake_world(8), without_inductor():
        options = {"optimizer": "adamw", **given}
        torch.compile(model, backend="osdp", options=options)(x).backward()
        session = session_for(model)
        assert session.plan == offline
        assert session.context.limit_bytes == offline.memory_limit_bytes
        assert session.options.memory_limit_bytes == limit_bytes
        (compiled,) = session.observed.graphs
    peak_bytes = max(timeline.peak_bytes for timeline in compiled.timelines.values())
    assert peak_bytes == pytest.approx(predicted(offline).peak_bytes, rel=1e-4)
    torch._dynamo.reset()


def test_a_step_has_the_arguments_of_plan_its_plan_and_its_simulation():
    x = torch.ones(8, 64)
    given = {"mesh": {"gpu": 8}, "hardware": SLOW, "memory_limit": "300KiB"}
    step = offline_step(Narrow(), (x,), **given)
    assert (step.ranks, step.limit_bytes, step.search) == ({"gpu": 8}, 300 << 10, "quick")
    found = step.plan()
    assert found == osdp_compile.plan(Narrow(), (x,), **given)
    simulated = step.simulated(found)
    assert simulated.peak.peak_bytes == predicted(found).peak_bytes
    assert simulated.step_seconds == pytest.approx(predicted(found).step_seconds, rel=1e-9)


def test_a_step_refuses_arguments_that_plan_does_not_have():
    x = torch.ones(8, 64)
    for name in ("memory_limits", "debug", "plan"):
        with pytest.raises(TypeError, match=name):
            offline_step(Narrow(), (x,), world_size=8, hardware=SLOW, **{name: None})
    with pytest.raises(TypeError, match="hardware"):
        offline_step(Narrow(), (x,), world_size=8)


@pytest.mark.thorough
def test_nothing_is_started_and_nothing_changed():
    model = GPT(SMALL)
    before = dict(model.named_parameters())
    osdp_compile.plan(model, batch(), world_size=4, hardware=SLOW)
    assert not dist.is_initialized()
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert type(model) is GPT
    assert model(*batch()).isfinite()


def test_a_model_too_large_for_this_machine():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1 << 16, 1 << 18), nn.Linear(1 << 18, 1 << 16)

        def forward(self, x):
            return self.down(self.up(x).relu()).square().mean()

    with torch.device("meta"):
        model, x = Wide(), torch.empty(4, 1 << 16)
    plan = osdp_compile.plan(model, (x,), world_size=64, hardware="h100-sxm", memory_limit="80GB")
    assert plan["up.weight"].decision != Decision.REPLICATE  # 64 GiB, 256 GiB with its state
    assert plan.prediction.peak_bytes <= 80 * 10**9


def test_tied_parameters_are_one_and_keyword_arguments_count():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.head = nn.Linear(16, 64, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, *, tokens):
            return self.head(self.embed(tokens)).square().mean()

    model = Tied()
    tokens = {"tokens": torch.zeros(2, 8, dtype=torch.long)}
    plan = osdp_compile.plan(model, kwargs=tokens, world_size=4, hardware=SLOW)
    assert [row.name for row in plan.parameters] == ["embed.weight"]
    assert model.head.weight is model.embed.weight


@pytest.mark.thorough
def test_a_mesh_of_two_dimensions_goes_stage_by_stage():
    hardware = generic(dimensions=("host", "gpu"))
    plan = osdp_compile.plan(on_meta(), batch(), mesh={"host": 4, "gpu": 8}, hardware=hardware)
    assert plan.world_size == 32
    assert any(one.stage for order in plan.order.values() for one in order)
    flat = osdp_compile.plan(on_meta(), batch(), mesh={"gpu": 32}, hardware=hardware)
    assert not any(one.stage for order in flat.order.values() for one in order)


@pytest.mark.thorough
def test_a_limit_that_is_too_low_names_the_least_that_works():
    given = {"world_size": 8, "hardware": SLOW}
    with pytest.raises(InfeasibleLimit, match="least possible") as refused:
        osdp_compile.plan(Narrow(), (torch.ones(8, 64),), memory_limit="10KiB", **given)
    least = refused.value.least_bytes
    plan = osdp_compile.plan(Narrow(), (torch.ones(8, 64),), memory_limit=least, **given)
    assert plan.prediction.peak_bytes <= least


@pytest.mark.thorough
def test_the_optimizer_counts():
    peaks = [
        osdp_compile.plan(
            Narrow(), (torch.ones(8, 64),), world_size=8, hardware=SLOW, optimizer=optimizer
        ).prediction.peak["optimizer"]
        for optimizer in ("adamw", 4)
    ]
    assert peaks[0] == pytest.approx(2 * peaks[1], rel=0.01)


@pytest.mark.parametrize(
    ("hardware", "held_bytes"),
    [("h100-sxm", 72 << 20), *thorough(("a100-80gb", 25427968), (SLOW, 0))],
)
def test_memory_that_a_gpus_libraries_keep_is_counted(hardware, held_bytes):
    peak = osdp_compile.plan(on_meta(), batch(), world_size=8, hardware=hardware).prediction.peak
    assert peak.get("libraries", 0) == held_bytes


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "give world_size, or mesh"),
        ({"world_size": 2, "mesh": {"gpu": 2}}, "and not both"),
        ({"world_size": 0}, "world_size=0"),
        ({"mesh": {"a": 2, "b": 2, "c": 2}}, "3 dimensions"),
        ({"mesh": {"host": 2, "gpu": "8"}}, "'gpu' is not a number of ranks"),
        ({"world_size": 2, "memory_limit": "lots"}, "option 'memory_limit'"),
        ({"world_size": 2, "optimizer": "adamv"}, "option 'optimizer'"),
        ({"world_size": 2, "hardware": "h100-smx"}, "option 'hardware'"),
    ],
)
def test_what_is_malformed_is_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        osdp_compile.plan(on_meta(), batch(), **{"hardware": SLOW, **wrong})


def test_a_frozen_model_has_nothing_to_plan():
    model = on_meta().requires_grad_(False)
    with pytest.raises(OsdpError, match="needs gradients"):
        osdp_compile.plan(model, batch(), world_size=2, hardware=SLOW)


def test_a_parameter_that_cannot_be_sharded_is_named():
    model = on_meta()
    model.token.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(OsdpError, match=r"'token\.weight' has a gradient hook"):
        osdp_compile.plan(model, batch(), world_size=2, hardware=SLOW)


def test_a_profile_of_one_process_is_not_enough():
    alone = dataclasses.replace(SLOW, collectives={})
    with pytest.raises(OsdpError, match="no rates for all_gather"):
        osdp_compile.plan(on_meta(), batch(), world_size=2, hardware=alone)
