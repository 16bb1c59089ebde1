"""What is predicted of a plan is what is lowered.

What it then takes: ``test_step_report.py``.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh

from examples.gpt import GPT, GPTConfig
from osdp_compile import plan_of
from osdp_compile.engine.backend import compile_graph
from osdp_compile.options import CheckedOptions
from osdp_compile.trace import fake_world
from passes.overlap.reorder_collectives import order_of
from passes.simulate.simulator import simulate
from passes.types.hardware import LinkRate
from tests.chosen import more
from tests.training import SLOW

pytestmark = pytest.mark.usefixtures("short_search")

#: Between hosts half of what flat collectives take for a byte, within a host hardly anything.
TWO_LEVELS = dataclasses.replace(
    SLOW,
    dimensions={
        name: dict.fromkeys(SLOW.collectives, LinkRate(1e-5, seconds_per_byte))
        for name, seconds_per_byte in (("host", 1e-8), ("gpu", 1e-9))
    },
)
CONFIG = GPTConfig(vocab=256, layers=2, width=192, heads=4, context=64)


def tokens() -> torch.Tensor:
    return torch.zeros(4, CONFIG.context, dtype=torch.long)


def planned_and_lowered(world_size, limit, hosts=1):
    """The plan of a step, and by graph what the simulator says of what would be compiled."""
    lowered = {}

    def observe(one, gm, ctx):
        if one.name == "reorder":
            lowered[ctx.phase.value] = order_of(gm.graph), ctx.base_bytes, simulate(gm.graph)

    def uncompiled(gm, inputs, **kwargs):
        return make_boxed_func(gm.forward)

    def backend(gm, inputs):
        given = {"hardware": SLOW, "debug": True, "memory_limit": limit}
        if hosts > 1:
            shape = (hosts, world_size // hosts)
            given["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("host", "gpu"))
            given["hardware"] = TWO_LEVELS
        options = CheckedOptions.parse(given)
        return compile_graph(gm, inputs, options, uncompiled, observe)

    model = GPT(CONFIG)
    torch.compiler.reset()
    with fake_world(world_size):
        torch.compile(model, backend=backend)(tokens(), tokens()).backward()
    torch.compiler.reset()
    return plan_of(model), lowered


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "limit", "hosts"),
    [
        (2, "15MiB", 1),
        (8, None, 2),
        *more((8, "11MiB", 2), (2, None, 1), (3, "12.5MiB", 1), (8, "10MiB", 1)),
    ],
)
def test_the_graphs_that_are_lowered_are_those_that_were_planned_on(world_size, limit, hosts):
    plan, lowered = planned_and_lowered(world_size, limit, hosts)
    assert any(one.stage for order in plan.order.values() for one in order) == (hosts > 1)
    prediction = plan.prediction
    assert {graph: order for graph, (order, *_) in lowered.items()} == plan.order
    exposed = sum(simulation.exposed_seconds for *_, simulation in lowered.values())
    assert exposed == pytest.approx(prediction.exposed_seconds)
    peak_bytes = max(base + simulation.peak_bytes for _, base, simulation in lowered.values())
    assert peak_bytes == pytest.approx(prediction.peak_bytes, rel=1e-4)


def uncompiled_under_16_mib(gm, inputs):
    options = CheckedOptions.parse({"hardware": SLOW, "memory_limit": "16MiB"})
    return compile_graph(gm, inputs, options, lambda gm, _, **__: make_boxed_func(gm.forward))


@pytest.mark.thorough
def test_the_first_batch_is_freed_and_a_larger_one_that_will_not_keep_the_limit_is_said(caplog):
    """What is made at the first call lives as long as the model."""

    def step(model, rows):
        tokens = torch.zeros(rows, CONFIG.context, dtype=torch.long)
        model(tokens, tokens).backward()
        return weakref.ref(tokens)

    torch.compiler.reset()
    with fake_world(2):
        model = torch.compile(GPT(CONFIG), backend=uncompiled_under_16_mib, dynamic=False)
        first = step(model, 4)
        gc.collect()
        assert first() is None
        assert "memory_limit" not in caplog.text
        step(model, 16)
    torch.compiler.reset()
    assert "above memory_limit=16 MiB: it has an input of shape (16, 64)" in caplog.text
