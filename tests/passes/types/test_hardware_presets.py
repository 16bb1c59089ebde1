"""Presets: known machines, in figures that a plan can be made with."""

from __future__ import annotations

import math

import pytest

from passes.types.hardware import Hardware
from passes.types.hardware_presets import PRESETS, between_hosts, preset

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
GPUS = [name for name in PRESETS if name != "cpu-gloo"]


def test_the_machines_that_are_known():
    assert list(PRESETS) == [
        "h100-sxm",
        "h200",
        "a100-40gb",
        "a100-80gb",
        "rtx-titan-pcie3",
        "cpu-gloo",
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_whole_profile_that_says_where_it_comes_from(name, tmp_path):
    hardware = preset(name)
    assert hardware.name == name and hardware.source
    assert set(hardware.collectives) == set(KINDS)
    assert all(rate.carried_out for rate in hardware.collectives.values())
    hardware.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == hardware


@pytest.mark.parametrize(
    ("name", "peak_flops", "peak_bytes_per_second", "memory_gb", "link_bytes_per_second"),
    [
        ("h100-sxm", 989.4e12, 3.35e12, 80, 450e9),
        ("h200", 989.4e12, 4.8e12, 141, 450e9),
        ("a100-40gb", 312e12, 1.555e12, 40, 300e9),
        ("a100-80gb", 312e12, 2.039e12, 80, 300e9),
        ("rtx-titan-pcie3", 130.5e12, 672e9, 24, 15.75e9),
    ],
)
def test_rates_are_below_the_published_peaks_and_not_far(
    name, peak_flops, peak_bytes_per_second, memory_gb, link_bytes_per_second
):
    hardware = preset(name)
    assert 0.5 < hardware.flops("float16") / peak_flops < 0.9
    assert 0.7 < hardware.memory_bytes_per_second / peak_bytes_per_second < 0.95
    assert hardware.memory_bytes == memory_gb * 10**9
    for rate in hardware.collectives.values():
        assert 0.6 < 1 / rate.seconds_per_byte / link_bytes_per_second < 0.95
        assert 0 < rate.overhead_seconds_per_byte < rate.seconds_per_byte


@pytest.mark.parametrize("name", GPUS)
def test_between_hosts_only_the_collectives_are_others(name):
    near, far = preset(name), between_hosts(preset(name), bits_per_second=100e9)
    assert far.flops_per_second == near.flops_per_second
    assert far.memory_bytes == near.memory_bytes
    for kind in KINDS:
        assert far.collectives[kind].latency_seconds > near.collectives[kind].latency_seconds
        assert far.collectives[kind].seconds_per_byte == pytest.approx(1 / (0.8 * 12.5e9))
    assert "100 Gb/s" in far.source


def test_an_unknown_machine_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'h300'; there are h100-sxm, h200, .*cpu-gloo"):
        preset("h300")


@pytest.mark.parametrize("name", GPUS)
def test_up_to_eight_ranks_are_one_host(name):
    assert preset(name).over({"ranks": 8}) == preset(name)
    assert preset("cpu-gloo").over({"ranks": 64}) == preset("cpu-gloo")


@pytest.mark.parametrize(
    ("name", "within", "of_eight_cards"),
    [("h100-sxm", 450e9, 400e9), ("a100-80gb", 300e9, 200e9), ("rtx-titan-pcie3", 15.75e9, 12.5e9)],
)
def test_a_ring_through_hosts_uses_all_their_cards(name, within, of_eight_cards):
    near, far = preset(name), preset(name).over({"ranks": 64})
    for kind in KINDS:
        rate = far.collectives[kind]
        slower = 1 / near.collectives[kind].seconds_per_byte / (1 / rate.seconds_per_byte)
        assert slower == pytest.approx(within / of_eight_cards, rel=0.01)
        ratio = rate.overhead_seconds_per_byte / rate.seconds_per_byte
        assert ratio == pytest.approx(0.15)
    # 56 ranks that are followed by one of their host, and 8 that are not.
    passing = 56 * preset(name).hosts.hop_seconds + 8 * 4e-6
    assert far.collectives["all_gather"].latency_seconds == pytest.approx(30e-6 + passing)
    more = preset(name).over({"ranks": 1024}).collectives["all_gather"]
    assert more.latency_seconds > 10 * far.collectives["all_gather"].latency_seconds


def test_more_bandwidth_is_between_hosts():
    ranks = {"ranks": 64}
    here, half, four = (
        preset("h100-sxm").with_bandwidth(times, ranks) for times in (1.0, 0.5, 4.0)
    )
    assert here == preset("h100-sxm")
    near = [one.over({"ranks": 8}).collectives for one in (half, here, four)]
    assert near[0] == near[1] == near[2]
    far = [one.over(ranks).collectives["all_gather"] for one in (half, here, four)]
    assert far[0].seconds_per_byte == pytest.approx(2 * far[1].seconds_per_byte)
    assert far[2].seconds_per_byte == near[1]["all_gather"].seconds_per_byte  # NVLink's, now
    assert len({rate.latency_seconds for rate in far}) == 1
    # A kernel of NCCL's holds its part of the GPU for as long as it runs.
    for rate in (*far, half.over({"host": 8, "gpu": 8}).dimensions["host"]["all_gather"]):
        assert rate.overhead_seconds_per_byte == pytest.approx(0.15 * rate.seconds_per_byte)


def test_where_bytes_take_no_time_only_latencies_are_left():
    endless = preset("h100-sxm").with_bandwidth(math.inf).over({"ranks": 64})
    for rate in endless.collectives.values():
        assert (rate.seconds_per_byte, rate.overhead_seconds_per_byte) == (0, 0)
        assert rate.latency_seconds > 30e-6


def test_a_mesh_of_hosts_has_rates_along_both_dimensions():
    hardware = preset("h100-sxm").over({"host": 8, "gpu": 8})
    assert hardware.dimensions["gpu"] == preset("h100-sxm").collectives
    between = hardware.dimensions["host"]["all_gather"]
    assert 1 / between.seconds_per_byte == pytest.approx(0.8 * 50e9)
    assert between.latency_seconds == pytest.approx(30e-6 + 8 * 4e-6)
    # Sixteen ranks are no host of these, so that what is along them is not known.
    assert preset("h100-sxm").over({"host": 4, "gpu": 16}).dimensions == {}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks": 8}, "hosts: .* missing .* `between`"),
        ({"ranks": 0, "between": {}}, "hosts: Expected `int` >= 1 - at `\\$.ranks`"),
        ({"ranks": 8, "between": {}, "cards": 8}, "hosts: unknown field \\$.cards"),
        ("eight", "hosts: Expected `object`, got `str`"),
    ],
)
def test_a_profile_with_malformed_hosts_is_refused(wrong, said):
    data = preset("h100-sxm").to_dict()
    data["hosts"] = wrong
    with pytest.raises(ValueError, match=said):
        Hardware.from_dict(data)
