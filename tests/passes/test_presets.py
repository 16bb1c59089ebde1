"""Presets: known machines, in figures that a plan can be made with."""

from __future__ import annotations

import pytest

from passes.hardware import Hardware
from passes.presets import PRESETS, between_hosts, preset

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
        assert 0 < rate.busy_seconds_per_byte < rate.seconds_per_byte


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
