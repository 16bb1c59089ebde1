"""The short calibration: sane figures, the same everywhere, in time, and right where known."""

from __future__ import annotations

import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from osdp_compile import calibrate
from osdp_compile.calibrate import measure_hardware
from passes.hardware import Hardware, LinkRate, generic

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def measure(rank, world_size, seconds):
    """The profile, and the seconds it took."""
    dist.barrier()
    start = time.perf_counter()
    hardware = measure_hardware(dist.group.WORLD, torch.device("cpu"), seconds=seconds)
    return hardware.to_dict(), time.perf_counter() - start


@pytest.fixture(scope="module")
def measured(two_ranks):
    return two_ranks.run(measure, 0.5)


def test_every_rank_gets_the_same_profile(measured):
    assert measured[0][0] == measured[1][0]
    assert "gloo" in measured[0][0]["name"] and "cpu" in measured[0][0]["name"]


def test_the_figures_are_those_of_a_machine(measured):
    hardware = Hardware.from_dict(measured[0][0])
    assert 1e8 < hardware.flops("float32") < 1e13  # one core of anything from a phone to a server
    assert 1e8 < hardware.memory_bytes_per_second < 1e12
    assert 1e-8 < hardware.launch_seconds < 1e-3
    assert set(hardware.collectives) == set(KINDS)
    for rate in hardware.collectives.values():
        assert 1e-7 <= rate.latency_seconds < 0.5
        assert 1e-12 < rate.seconds_per_byte < 1e-6


def test_it_keeps_to_its_time(measured):
    # Other processes may hold the cores: the allowance is wide, what it forbids is minutes.
    assert max(seconds for _, seconds in measured) < 10


class Wire:
    """A network of known rates that carries one collective at a time, in the order of starting."""

    def __init__(self, latency_seconds: float, seconds_per_byte: float) -> None:
        self.rate = LinkRate(latency_seconds, seconds_per_byte)
        self.free_at = 0.0
        self.carried_bytes = 0

    def collective(self, kind, group, size_bytes, device):
        world_size = dist.get_world_size(group)
        wire_bytes = size_bytes * (world_size - 1) // world_size * (1 + (kind == "all_reduce"))

        def start():
            takes = self.rate.latency_seconds + wire_bytes * self.rate.seconds_per_byte
            self.free_at = max(time.perf_counter(), self.free_at) + takes
            self.carried_bytes += wire_bytes
            return [Sent(self.free_at)]

        return start, wire_bytes


class Sent:
    def __init__(self, arrives_at: float) -> None:
        self.arrives_at = arrives_at

    def wait(self):
        time.sleep(max(0.0, self.arrives_at - time.perf_counter()))


def measure_over(rank, world_size, kind, latency_seconds, seconds_per_byte, budget_seconds):
    """The rate found for a wire, the seconds it took, and the bytes that were sent."""
    wire = Wire(latency_seconds, seconds_per_byte)
    with mock.patch.object(calibrate, "_collective", wire.collective):
        start = time.perf_counter()
        found = calibrate._link(kind, dist.group.WORLD, torch.device("cpu"), budget_seconds)
        took = time.perf_counter() - start
    return found.latency_seconds, found.seconds_per_byte, took, wire.carried_bytes


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
@pytest.mark.parametrize(
    ("latency_seconds", "seconds_per_byte"),
    [(1e-3, 2e-8), (2e-2, 8e-8)],
    ids=["400 Mbit/s", "100 Mbit/s, far away"],
)
def test_the_rates_of_a_known_wire_are_found(two_ranks, kind, latency_seconds, seconds_per_byte):
    found = two_ranks.run(measure_over, kind, latency_seconds, seconds_per_byte, 0.2)
    assert found[0][:2] == found[1][:2]
    for latency, per_byte, took, _ in found:
        assert math.isclose(latency, latency_seconds, rel_tol=0.5, abs_tol=3e-3)
        assert math.isclose(per_byte, seconds_per_byte, rel_tol=0.5)
        assert took < 3


def test_a_slow_wire_gets_fewer_bytes_not_more_time(two_ranks):
    fast = two_ranks.run(measure_over, "all_gather", 1e-4, 1e-9, 0.2)[0]
    slow = two_ranks.run(measure_over, "all_gather", 1e-4, 1e-7, 0.2)[0]
    assert slow[3] < fast[3] / 10
    assert slow[2] < 3


def run_collectives(rank, world_size, size_bytes):
    """Run one of each; their wire bytes."""
    wire = {}
    for kind in KINDS:
        start, wire[kind] = calibrate._collective(
            kind, dist.group.WORLD, size_bytes, torch.device("cpu")
        )
        for work in start():
            work.wait()
    return wire


def test_wire_bytes_are_what_one_rank_sends_in_a_ring(four_ranks):
    wire = four_ranks.run(run_collectives, 1 << 20)[0]
    part = 3 * (1 << 20) // 4
    assert wire == {
        "all_gather": part,
        "reduce_scatter": part,
        "all_reduce": 2 * part,
        "all_to_all": part,
    }


def test_a_fake_group_is_not_measured():
    if dist.is_initialized():
        pytest.skip("another test holds the default process group of this process")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        assert measure_hardware(dist.group.WORLD, torch.device("cpu")) == generic()
    finally:
        dist.destroy_process_group()
