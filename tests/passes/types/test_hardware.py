"""The hardware profile: the alpha-beta model of collectives, saving and loading."""

from __future__ import annotations

import dataclasses

import pytest

from passes.types.hardware import Hardware, LinkRate, generic


def profile() -> Hardware:
    return Hardware(
        name="test",
        flops_per_second={"float32": 2e10, "default": 1e10},
        memory_bytes_per_second=1e9,
        launch_seconds=1e-5,
        collectives={
            "all_gather": LinkRate(1e-3, 1e-8),
            "reduce_scatter": LinkRate(2e-3, 1e-8),
            "all_reduce": LinkRate(3e-3, 1e-8),
        },
    )


def test_a_gather_costs_its_latency_and_what_one_rank_sends_in_a_ring():
    # Of 4 MB on 4 ranks each sends three quarters.
    assert profile().collective_seconds("all_gather", 4_000_000, 4) == pytest.approx(1e-3 + 3e-2)
    assert profile().collective_seconds("reduce_scatter", 4_000_000, 4) == pytest.approx(3.2e-2)


def test_an_all_reduce_sends_everything_twice():
    assert profile().collective_seconds("all_reduce", 4_000_000, 4) == pytest.approx(3e-3 + 6e-2)


def test_one_rank_communicates_for_free():
    assert profile().collective_seconds("all_gather", 1 << 30, 1) == 0.0


def test_a_collective_that_was_not_measured_is_a_key_error():
    with pytest.raises(KeyError, match="all_to_all"):
        profile().collective_seconds("all_to_all", 1, 2)


def test_types_that_were_not_measured_run_at_the_default_rate():
    assert profile().flops("float32") == 2e10
    assert profile().flops("bfloat16") == 1e10


def test_a_saved_profile_loads_as_it_was(tmp_path):
    profile().save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == profile()
    assert Hardware.load(str(tmp_path / "hardware.json")) != generic()


def without(field):
    data = profile().to_dict()
    del data[field]
    return data


def test_computing_pays_for_the_start_of_a_collective_and_for_its_bytes():
    link = LinkRate(1e-3, 1e-8, overhead_seconds_per_byte=1e-9, start_seconds=2e-4)
    busy = dataclasses.replace(profile(), collectives={"all_gather": link})
    assert busy.compute_overhead_seconds("all_gather", 8_000_000, 4) == pytest.approx(2e-4 + 6e-3)
    assert busy.compute_overhead_seconds("all_gather", 8_000_000, 1) == 0.0


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        3,
        without("memory_bytes_per_second"),
        without("collectives"),
        {**profile().to_dict(), "more": 1},
        {**profile().to_dict(), "collectives": {"all_gather": {"latency_seconds": 1.0}}},
        {**profile().to_dict(), "collectives": 3},
        {**profile().to_dict(), "flops_per_second": {"float32": 1e10}},
        {**profile().to_dict(), "memory_bytes": 1.5},
        {**profile().to_dict(), "source": None},
        {**profile().to_dict(), "launch_seconds": float("nan")},
        {**profile().to_dict(), "launch_seconds": float("inf")},
        {**profile().to_dict(), "memory_bytes_per_second": float("inf")},
    ],
)
def test_what_is_no_profile_is_refused(data):
    with pytest.raises(ValueError, match="not a hardware profile"):
        Hardware.from_dict(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"more": 1}, "unknown field \\$.more"),
        ({"memory_bytes_per_second": 0}, "`float` > 0.0 - at `\\$.memory_bytes_per_second`"),
        ({"launch_seconds": "1"}, "`float`, got `str` - at `\\$.launch_seconds`"),
        ({"flops_per_second": {"float32": 1e10}}, "no 'default'"),
        (
            {"collectives": {"all_gather": {"latency_seconds": 1}}},
            "'all_gather': .* missing .* `seconds_per",
        ),
        ({"collectives": {"all_gather": 3}}, "'all_gather': Expected `object`, got `int`"),
        ({"dimensions": 3}, "`object`, got `int` - at `\\$.dimensions`"),
        ({"dimensions": {"dp": 3}}, "collectives along 'dp': 3 is no table"),
        ({"dimensions": {"dp": {"all_gather": 3}}}, "'all_gather' along 'dp': Expected"),
    ],
)
def test_the_error_says_what_is_wrong(change, said):
    with pytest.raises(ValueError, match=said):
        Hardware.from_dict({**profile().to_dict(), **change})


def test_profiles_from_before_sizes_and_sources_load():
    data = profile().to_dict()
    for field in ("memory_bytes", "source"):
        del data[field]
    for rate in data["collectives"].values():
        del rate["carried_out"], rate["overhead_seconds_per_byte"]
    loaded = Hardware.from_dict(data)
    assert loaded == profile()
    assert (loaded.memory_bytes, loaded.source) == (0, "")


def test_a_dimension_of_the_mesh_has_rates_of_its_own(tmp_path):
    slow = LinkRate(latency_seconds=1.0, seconds_per_byte=1.0)
    rates = dict.fromkeys(profile().collectives, slow)
    hardware = dataclasses.replace(profile(), dimensions={"host": rates})
    hardware.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == hardware
    assert hardware.along("host").collectives == rates
    assert hardware.along("host").flops_per_second == hardware.flops_per_second
    assert hardware.along("gpu") == hardware.along(None) == hardware


def test_a_network_of_more_bandwidth_takes_less_for_each_byte_and_as_long_to_start():
    link = LinkRate(1e-3, 1e-8, overhead_seconds_per_byte=1e-9, start_seconds=2e-4)
    along = {"host": {"all_gather": link}, "gpu": {"all_gather": link}}
    here = dataclasses.replace(profile(), collectives={"all_gather": link}, dimensions=along)
    faster = dataclasses.replace(link, seconds_per_byte=2.5e-9)  # a byte is still copied
    flat = here.with_bandwidth(4.0, {"ranks": 8})
    assert flat.collectives == {"all_gather": faster}
    assert flat.dimensions == {"host": {"all_gather": faster}, "gpu": {"all_gather": faster}}
    # Of a mesh of two dimensions the inner one is within a host.
    mesh = here.with_bandwidth(4.0, {"host": 2, "gpu": 4})
    assert mesh.dimensions == {"host": {"all_gather": faster}, "gpu": {"all_gather": link}}
    endless = here.with_bandwidth(float("inf"))
    assert endless.collective_seconds("all_gather", 1 << 30, 8) == 1e-3
    assert here.with_bandwidth(1.0) == here


def test_a_profile_of_version_0_1_is_read():
    data = profile().to_dict()
    for rate in data["collectives"].values():
        rate["wake_seconds"] = rate.pop("start_delay_seconds")
        rate["busy_seconds_per_byte"] = rate.pop("overhead_seconds_per_byte")
    assert Hardware.from_dict(data) == profile()


def test_a_file_that_holds_no_json_is_refused(tmp_path):
    (tmp_path / "hardware.json").write_text("hardware")
    with pytest.raises(ValueError, match="holds no hardware profile"):
        Hardware.load(tmp_path / "hardware.json")


def test_the_generic_profile_prices_every_collective():
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        small, large = (generic().collective_seconds(kind, size, 8) for size in (1, 1 << 30))
        assert 0 < small < large
    assert dataclasses.replace(generic(), name="other") != generic()
