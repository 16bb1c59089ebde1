"""Measured times of operators and of the optimizer's step, and that they reach the prediction."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from osdp_compile import Plan
from osdp_compile.kernel_times import with_kernel_seconds
from osdp_compile.update_times import with_update_seconds
from passes.annotate import cost_of, kernel_key, stands_alone
from passes.pipeline import default_passes
from passes.plan import complete
from passes.predict import predict
from tests.passes import graphs
from tests.passes.captures import capture_step

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8 * 36, 50)

    def forward(self, batch):
        return self.linear(torch.relu(self.convolution(batch)).flatten(1)).square().mean()


@pytest.fixture(scope="module")
def step():
    return capture_step(Model(), torch.randn(16, 3, 8, 8))


def kernels(captured):
    return {
        kernel_key(node): node
        for gm in (captured.forward, captured.backward)
        for node in gm.graph.nodes
        if stands_alone(node)
    }


def test_every_large_operator_is_run_once_and_its_time_is_the_nodes_price(step):
    captured, ctx = step
    hardware = with_kernel_seconds(captured, ctx, CPU, seconds=10.0, most_bytes=1 << 30)
    assert set(hardware.kernel_seconds) == set(kernels(captured))
    assert {key.split(".")[1] for key in hardware.kernel_seconds} >= {"convolution", "addmm", "mm"}
    plan = Plan.uniform(Model().named_parameters(), "shard_again", world_size=4)
    lowered = predict(captured, plan, ctx.replace(hardware=hardware), default_passes())
    priced = kernels(lowered)
    assert set(priced) == set(hardware.kernel_seconds)
    for key, node in priced.items():
        assert cost_of(node).seconds == hardware.kernel_seconds[key]


def test_a_measured_time_is_what_the_operator_takes():
    rows = torch.randn(64, 1500)
    captured, ctx = capture_step(nn.Linear(1500, 1500), rows)
    fast = dataclasses.replace(ctx.hardware, flops_per_second={"default": 1e15})
    ctx = ctx.replace(hardware=fast)  # nothing is slower beside other ranks
    hardware = with_kernel_seconds(captured, ctx, CPU, seconds=10.0, most_bytes=1 << 30)
    (found,) = (s for key, s in hardware.kernel_seconds.items() if "addmm" in key)
    weight, bias = torch.randn(1500, 1500), torch.randn(1500)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        torch.addmm(bias, rows, weight.t())
        times.append(time.perf_counter() - begin)
    assert 0.2 * min(times) < found < 5 * max(times)


def test_no_time_and_no_memory_leave_the_formula(step):
    captured, ctx = step
    for seconds, most_bytes in ((0.0, 1 << 30), (10.0, 0)):
        hardware = with_kernel_seconds(captured, ctx, CPU, seconds=seconds, most_bytes=most_bytes)
        assert hardware.kernel_seconds == {}


def test_what_is_slower_beside_other_ranks_is_scaled(step):
    captured, ctx = step
    free = ctx.hardware
    rates = {key: {"default": rate} for key, rate in (("alone", 1e15), ("contended", 1e6))}
    found = {
        key: with_kernel_seconds(
            captured,
            ctx.replace(hardware=dataclasses.replace(free, flops_per_second=rate)),
            CPU,
            seconds=10.0,
            most_bytes=1 << 30,
        ).kernel_seconds
        for key, rate in rates.items()
    }
    # A product at 1 MFLOP/s when all work: this machine alone is more than 100 times faster.
    assert all(found["contended"][key] > 10 * found["alone"][key] for key in found["alone"])


def test_the_optimizers_step_is_measured(step):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        hardware = with_update_seconds(graphs.hardware(), dist.group.WORLD, CPU, 1 << 26)
    finally:
        dist.destroy_process_group()
    assert 1e-12 < hardware.update_seconds_per_byte < 1e-7
    assert 1e-6 < hardware.update_seconds_per_parameter < 1e-1
    assert hardware.update_seconds(1000, 3) == pytest.approx(
        1000 * hardware.update_seconds_per_byte + 3 * hardware.update_seconds_per_parameter
    )


def test_a_plan_made_by_hand_gets_an_order_and_a_prediction(step):
    captured, ctx = step
    plan = Plan.uniform(Model().named_parameters(), "shard_again", world_size=4)
    completed = complete(plan, captured, ctx, default_passes())
    assert completed.parameters == plan.parameters
    served = {name for collective in completed.order["backward"] for name in collective.names}
    assert served == {row.name for row in plan.parameters}
    assert completed.prediction == predict(captured, completed, ctx, default_passes()).prediction
    kept = complete(completed, captured, ctx, default_passes())
    assert kept == completed
