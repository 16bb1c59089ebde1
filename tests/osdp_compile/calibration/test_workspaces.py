"""Measured workspaces: they are what the counting allocator sees, and reach the prediction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from osdp_compile import PeakMemory, Plan
from osdp_compile.calibration.operator_times import on_made_up_inputs
from osdp_compile.calibration.workspaces import measured_workspaces
from passes.annotate.annotate_costs import cost_of
from passes.pipeline import default_passes
from passes.pricing.predict import predict
from tests.osdp_compile.calibration.test_operator_times import kernels
from tests.passes.captures import capture_step

aten = torch.ops.aten
CPU = torch.device("cpu")
MOST_BYTES = 1 << 30


class Model(nn.Module):
    """Convolutions of odd sizes: wide, of few channels, transposed, in groups; an attention."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 16, stride=4)
        self.up = nn.ConvTranspose2d(12, 20, 3, stride=2)
        self.groups = nn.Conv2d(20, 40, 3, groups=4)
        self.linear = nn.Linear(40, 40)

    def forward(self, x):
        x = torch.relu(self.groups(self.up(self.patches(x)))).flatten(2).transpose(1, 2)
        x = self.linear(x).unflatten(2, (4, 10)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x).square().mean()


@pytest.fixture(scope="module")
def step():
    return capture_step(Model(), torch.randn(4, 3, 40, 40))


def counted_bytes(node):
    """Bytes beside inputs and results, by another means: the allocator that counts.

    It counts for the whole process: a tensor that the garbage collector or another thread frees
    meanwhile is added. So the least of ten runs is taken.
    """
    run = on_made_up_inputs(node, torch.device("cpu"))
    run()
    found = []
    for _ in range(10):
        with PeakMemory() as memory:
            results = run()
        del results
        found.append(memory.peak_bytes - memory.current_bytes)
    return min(found)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_each_operator_but_matrix_products_takes_what_is_counted(step, threads):
    captured, _ = step
    found = measured_workspaces(captured, CPU, MOST_BYTES)
    nodes = kernels(captured)
    products = {
        key for key, one in nodes.items() if one.target in (aten.mm.default, aten.addmm.default)
    }
    assert found.keys() == nodes.keys() - products
    # Attention's backward allocates 128 bytes in each other thread, and torch records one thread.
    for key, found_bytes in found.items():
        assert 0 <= counted_bytes(nodes[key]) - found_bytes <= 128 * (threads - 1)
    assert sum(one > 0 for one in found.values()) >= 6


def test_measurements_take_the_place_of_the_formula(step):
    captured, ctx = step
    found = measured_workspaces(captured, CPU, MOST_BYTES)
    plan = Plan.uniform(Model().named_parameters(), "shard_regather", world_size=4)
    lowered = predict(captured, plan, ctx.replace(workspaces=found), default_passes())
    nodes = kernels(lowered)
    assert {key: cost_of(nodes[key]).workspace_bytes for key in found} == found


def test_an_operator_above_the_limit_is_not_run(step):
    captured, _ = step
    assert measured_workspaces(captured, CPU, 0) == {}


def test_a_profiler_of_the_user_goes_on(step):
    captured, _ = step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        found = measured_workspaces(captured, CPU, MOST_BYTES)
        torch.ones(4).exp()
    assert found == measured_workspaces(captured, CPU, MOST_BYTES)
    assert "aten::exp" in {event.key for event in profiler.key_averages()}
