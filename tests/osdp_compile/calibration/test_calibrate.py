"""Calibration, short and long: sane figures, the same everywhere, right where known."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from osdp_compile.calibration import collective_times, compute_overhead, timed_collectives
from osdp_compile.calibration.calibrate import calibrate, measure_hardware
from osdp_compile.reports.peak_memory import PeakMemory
from passes.types.hardware import Hardware, LinkRate, generic

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def measure(rank, world_size, seconds):
    """The profile, and the seconds of this process's processor time that it took."""
    start = time.process_time()
    hardware = measure_hardware(dist.group.WORLD, torch.device("cpu"), seconds=seconds)
    return hardware.to_dict(), time.process_time() - start


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
        assert 0 <= rate.overhead_seconds_per_byte < 1e-6
    assert hardware.memory_bytes > 1 << 28
    assert hardware.source.startswith("measured") and torch.__version__ in hardware.source


def test_it_says_how_gloo_carries_each_out(measured):
    collectives = measured[0][0]["collectives"]
    assert {kind: rate["carried_out"] for kind, rate in collectives.items()} == {
        "all_gather": "messages",
        "reduce_scatter": "all_reduce inside",
        "all_reduce": "ring",
        "all_to_all": "messages",
    }


def test_it_keeps_to_its_time(measured):
    # Its own processor time: other processes may hold the cores for as long as they like.
    assert max(seconds for _, seconds in measured) < 10


class Clock:
    """A clock that only the wire and computing move: however busy the machine is, it is right."""

    def __init__(self) -> None:
        self.now, self.own = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.own

    def compute(self, seconds: float) -> float:
        """Of this rank's own core; gives the seconds back."""
        self.now += seconds
        self.own += seconds
        return seconds

    def product(self, device: torch.device) -> Callable[[int], float]:
        """In place of matrix products: 0.1 ms each."""
        return lambda times: self.compute(1e-4 * times)


class Wire:
    """A network of known rates that carries one collective at a time, in the order of starting."""

    def __init__(
        self,
        clock: Clock,
        latency_seconds: float,
        seconds_per_byte: float,
        starting: float = 0.0,
        each: float = 0.0,
    ) -> None:
        """``starting``: seconds of this rank's own core that each byte takes to send, and
        ``each`` every collective."""
        self.clock, self.starting, self.each = clock, starting, each
        self.rate = LinkRate(latency_seconds, seconds_per_byte)
        self.free_at = 0.0
        self.carried_bytes = 0

    def collective(self, kind, group, size_bytes, device):
        world_size = dist.get_world_size(group)
        wire_bytes = size_bytes * (world_size - 1) // world_size * (1 + (kind == "all_reduce"))

        def start():
            self.clock.compute(self.each + wire_bytes * self.starting)
            takes = self.rate.latency_seconds + wire_bytes * self.rate.seconds_per_byte
            self.free_at = max(self.clock.now, self.free_at) + takes
            self.carried_bytes += wire_bytes
            return [Sent(self.clock, self.free_at)]

        return start, wire_bytes


class Sent:
    def __init__(self, clock: Clock, arrives_at: float) -> None:
        self.clock, self.arrives_at = clock, arrives_at

    def wait(self):
        self.clock.now = max(self.clock.now, self.arrives_at)


@contextmanager
def over(collective, clock: Clock) -> Iterator[None]:
    """Inside, collectives are what a test says, and so is the time."""
    with (
        mock.patch.object(timed_collectives, "collective", collective),
        mock.patch.object(compute_overhead, "_product", clock.product),
        mock.patch.object(timed_collectives, "time", clock),
        mock.patch.object(compute_overhead, "time", clock),
    ):
        yield


def measure_over(
    rank, world_size, form, kind, latency_seconds, seconds_per_byte, budget_seconds, **own_core
):
    """The rate found for a wire, the seconds it took, and the bytes that were sent."""
    clock = Clock()
    wire = Wire(clock, latency_seconds, seconds_per_byte, **own_core)
    with over(wire.collective, clock):
        find = {"quick": collective_times.quick_link, "swept": collective_times.swept_link}[form]
        found = find(kind, dist.group.WORLD, torch.device("cpu"), budget_seconds, 1 << 28).rate
    return found, clock.now, wire.carried_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
@pytest.mark.parametrize(
    ("latency_seconds", "seconds_per_byte"),
    [(1e-3, 2e-8), (2e-2, 8e-8)],
    ids=["400 Mbit/s", "100 Mbit/s, far away"],
)
@pytest.mark.parametrize(("form", "budget_seconds"), [("quick", 0.15), ("swept", 1.0)])
def test_the_rates_of_a_known_wire_are_found(
    two_ranks, form, budget_seconds, kind, latency_seconds, seconds_per_byte
):
    found = two_ranks.run(
        measure_over, form, kind, latency_seconds, seconds_per_byte, budget_seconds
    )
    assert found[0][0] == found[1][0]
    for rate, took, _ in found:
        assert math.isclose(rate.latency_seconds, latency_seconds, rel_tol=0.01)
        assert math.isclose(rate.seconds_per_byte, seconds_per_byte, rel_tol=0.01)
        assert took < 3 + 3 * budget_seconds


def test_a_slow_wire_gets_fewer_bytes_not_more_time(two_ranks):
    fast = two_ranks.run(measure_over, "quick", "all_gather", 1e-4, 1e-9, 0.2)[0]
    slow = two_ranks.run(measure_over, "quick", "all_gather", 1e-4, 1e-7, 0.2)[0]
    assert slow[2] < fast[2] / 10
    assert slow[1] < 3


def test_computing_beside_a_busy_wire_is_found_to_take_longer(two_ranks):
    # What starting takes of this rank's core for every byte; the wire itself takes none.
    def found(starting):
        rates = two_ranks.run(
            measure_over, "swept", "all_gather", 1e-3, 2e-8, 1.0, starting=starting
        )
        assert rates[0][0] == rates[1][0]
        return rates[0][0].overhead_seconds_per_byte

    assert math.isclose(found(1e-8), 1e-8, rel_tol=0.01)
    assert found(0.0) == pytest.approx(0.0, abs=1e-15)


def measure_busy_by_kind(rank, world_size):
    """What a byte takes of this rank's core, by kind: all-reduces three times as much."""
    clock = Clock()
    wires = {"all_gather": Wire(clock, 1e-3, 2e-8, starting=1e-8)}
    wires["all_to_all"] = wires["all_gather"]  # what stands for all where one does
    wires["all_reduce"] = Wire(clock, 1e-3, 2e-8, starting=3e-8)

    def collective(kind, *args):
        return wires[kind].collective(kind, *args)

    group, device = dist.group.WORLD, torch.device("cpu")
    with over(collective, clock):
        found = {
            kind: collective_times.quick_link(kind, group, device, 0.15, 1 << 28) for kind in wires
        }
        busy = collective_times.with_busy(found, group, device, 0.5)
    return {kind: link.rate.overhead_seconds_per_byte for kind, link in busy.items()}


def test_each_kinds_own_share_of_the_processor_is_found(two_ranks):
    one, other = two_ranks.run(measure_busy_by_kind)
    assert one == other
    assert one["all_gather"] == pytest.approx(1e-8, rel=0.01)
    assert one["all_reduce"] == pytest.approx(3e-8, rel=0.01)


def check_over(rank, world_size, seconds_per_byte, said_seconds_per_byte):
    """Whether rates are found to hold on a wire."""
    clock = Clock()
    wire = Wire(clock, 1e-3, seconds_per_byte)
    said = dict.fromkeys(collective_times.KINDS, LinkRate(1e-3, said_seconds_per_byte))
    hardware = dataclasses.replace(generic(), collectives=said)
    with over(wire.collective, clock):
        holds = collective_times.rates_hold(
            hardware, dist.group.WORLD, torch.device("cpu"), 1 << 24
        )
    return holds, clock.now


@pytest.mark.parametrize(("times_as_fast", "holds"), [(1, True), (10, False), (0.1, False)])
def test_rates_hold_on_a_wire_that_has_them(two_ranks, times_as_fast, holds):
    found = two_ranks.run(check_over, 8e-8 / times_as_fast, 8e-8)
    assert [held for held, _ in found] == [holds, holds]
    assert max(seconds for _, seconds in found) < 10


@pytest.mark.parametrize("form", ["quick", "swept"])
def test_what_starting_takes_is_found(two_ranks, form):
    rates = two_ranks.run(measure_over, form, "all_gather", 1e-2, 2e-8, 0.2, each=5e-3)
    assert rates[0][0] == rates[1][0]
    assert math.isclose(rates[0][0].start_seconds, 5e-3, rel_tol=0.01)


def calibrate_at_leisure(rank, world_size):
    said = []
    start = time.process_time()
    found = calibrate(
        dist.group.WORLD,
        torch.device("cpu"),
        seconds=2.0,
        scratch_bytes=1 << 24,
        progress=lambda what, done: said.append((what, done)),
    )
    took = time.process_time() - start  # its own, however busy the machine is
    samples = {kind: len(link.samples) for kind, link in found.links[""].items()}
    return found.hardware.to_dict(), samples, said, took


def test_at_leisure_every_collective_is_swept_and_every_rank_finds_the_same(two_ranks):
    one, other = two_ranks.run(calibrate_at_leisure)
    assert one[0] == other[0]
    hardware, samples, said, took = one
    assert set(Hardware.from_dict(hardware).flops_per_second) >= {"float32", "bfloat16"}
    assert set(samples) == set(KINDS) and min(samples.values()) >= 3
    assert [what for what, _ in said[1:]] == [*KINDS, "done"]
    assert [done for _, done in said] == sorted(done for _, done in said)
    assert took < 20


def calibrate_a_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "core"))
    found = calibrate(
        dist.group.WORLD,
        torch.device("cpu"),
        seconds=2.0,
        scratch_bytes=1 << 23,
        along={name: mesh.get_group(name) for name in ("host", "core")},
    )
    return found.hardware.to_dict()


@pytest.mark.thorough
def test_every_dimension_of_a_mesh_has_its_own_rates(four_ranks):
    found = four_ranks.run(calibrate_a_mesh)
    assert all(one == found[0] for one in found)
    hardware = Hardware.from_dict(found[0])
    assert set(hardware.dimensions) == {"host", "core"}
    for kinds in (hardware.collectives, *hardware.dimensions.values()):
        assert set(kinds) == set(KINDS)
    assert hardware.along("core").collectives == hardware.dimensions["core"]


def test_one_process_has_no_collectives():
    found = calibrate(None, torch.device("cpu"), seconds=0.2, scratch_bytes=1 << 23)
    assert found.links == {} == found.hardware.collectives
    assert found.hardware.collective_seconds("all_gather", 1 << 20, 1) == 0.0
    assert found.hardware.compute_overhead_seconds("all_gather", 1 << 20, 1) == 0.0


def measure_in(rank, world_size, scratch_bytes):
    """The most bytes that measuring held; the ranks do not have the same to spare."""
    with PeakMemory() as memory:
        measure_hardware(
            dist.group.WORLD, torch.device("cpu"), 0.3, scratch_bytes + rank * (1 << 26)
        )
    return memory.peak_bytes


def test_measuring_keeps_to_the_scratch_memory_of_the_rank_with_least(two_ranks):
    assert max(two_ranks.run(measure_in, 24 << 20)) <= 24 << 20


def run_collectives(rank, world_size, size_bytes):
    """Run one of each; their wire bytes."""
    wire = {}
    for kind in KINDS:
        start, wire[kind] = timed_collectives.collective(
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
