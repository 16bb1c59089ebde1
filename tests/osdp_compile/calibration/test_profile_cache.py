"""Measured profiles are kept on disk: found again, measured anew when damaged, or not kept."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp_compile import InfeasibleLimit, plan_of
from osdp_compile.calibration import profile_cache
from osdp_compile.calibration.profile_cache import cache_folder, hardware_of
from osdp_compile.errors import OsdpError
from passes.types.hardware import Hardware, LinkRate, generic
from tests.chosen import more

CPU = torch.device("cpu")


def named(rank, world_size, folders, name, host="host", scratch_bytes=1 << 24, calls=1, holds=True):
    """The names of the profiles found, how often was measured, and what was logged.

    A measurement costs nothing here and finds a profile of the given name. ``holds``: whether
    the network is found to be what a kept profile says.
    """
    measured = []
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("osdp_compile")

    def measure(group, device, scratch_bytes, along):
        dist.barrier(group)  # hangs unless every rank measures
        measured.append(scratch_bytes)
        return generic(name)

    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with (
            mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": folders[rank]}),
            mock.patch.dict(profile_cache._in_process, clear=True),
            mock.patch.object(profile_cache, "measure_hardware", measure),
            mock.patch.object(profile_cache, "rates_hold", lambda *_: holds),
            mock.patch.object(socket, "gethostname", lambda: f"{host}{rank}"),
        ):
            found = [hardware_of(dist.group.WORLD, CPU, scratch_bytes).name for _ in range(calls)]
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return found, len(measured), said


def find(two_ranks, folder, name, **kwargs):
    """What both ranks find, each with the same folder: one name, and whether it was measured."""
    one, other = two_ranks.run(named, [str(folder)] * 2, name, **kwargs)
    assert one[:2] == other[:2]
    return one[0][-1], one[1]


def files(folder):
    return sorted(Path(folder).iterdir())


def test_what_was_measured_is_found_again(two_ranks, tmp_path):
    folder = tmp_path / "made" / "here"
    assert find(two_ranks, folder, "first") == ("first", 1)
    assert find(two_ranks, folder, "second") == ("first", 0)
    (path,) = files(folder)
    assert path.name.startswith("cpu-x2-")
    assert Hardware.load(path) == generic("first")


def test_rank_0_says_which_file_it_was_and_what_to_do(two_ranks, tmp_path):
    kept = two_ranks.run(named, [str(tmp_path)] * 2, "first")
    found = two_ranks.run(named, [str(tmp_path)] * 2, "second")
    (path,) = files(tmp_path)
    for said, word in ((kept, "delete it"), (found, "OSDP_CACHE_DIR")):
        assert len(said[0][2]) == 1 and str(path) in said[0][2][0] and word in said[0][2][0]
        assert said[1][2] == []


def test_in_one_process_it_is_looked_for_once(two_ranks):
    assert two_ranks.run(named, ["", ""], "first", calls=3)[0][1] == 1


@pytest.mark.parametrize("damage", [b"{", *more(b"", b"\xff\xfe", b"[]", b'{"name": "other"}')])
def test_a_damaged_file_is_measured_anew_and_written_over(two_ranks, tmp_path, damage):
    find(two_ranks, tmp_path, "first")
    (path,) = files(tmp_path)
    path.write_bytes(damage)
    assert find(two_ranks, tmp_path, "second") == ("second", 1)
    assert files(tmp_path) == [path]
    assert find(two_ranks, tmp_path, "third") == ("second", 0)


def test_another_network_is_measured_anew_and_written_over(two_ranks, tmp_path):
    find(two_ranks, tmp_path, "first")
    one, other = two_ranks.run(named, [str(tmp_path)] * 2, "second", holds=False)
    assert one[:2] == other[:2] == (["second"], 1)
    assert any("no longer" in said for said in one[2]) and other[2] == []
    assert len(files(tmp_path)) == 1
    assert find(two_ranks, tmp_path, "third") == ("second", 0)


def test_an_empty_folder_name_keeps_nothing(two_ranks):
    assert find(two_ranks, "", "first") == ("first", 1)
    assert find(two_ranks, "", "second") == ("second", 1)


def test_a_folder_that_cannot_be_written_does_no_harm(two_ranks, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert find(two_ranks, tmp_path / "file", "first") == ("first", 1)


def test_only_rank_0s_folder_counts(two_ranks, tmp_path):
    find(two_ranks, tmp_path / "a", "first")
    for folders, found in ((["a", "b"], "first"), (["b", "a"], "second")):
        paths = [str(tmp_path / folder) for folder in folders]
        assert {r[0][0] for r in two_ranks.run(named, paths, "second")} == {found}


def test_other_machines_and_less_memory_are_other_profiles(two_ranks, tmp_path):
    assert find(two_ranks, tmp_path, "first") == ("first", 1)
    assert find(two_ranks, tmp_path, "second", host="elsewhere") == ("second", 1)
    assert find(two_ranks, tmp_path, "third", scratch_bytes=1 << 28) == ("third", 1)
    assert find(two_ranks, tmp_path, "fourth") == ("first", 0)
    assert len(files(tmp_path)) == 3


def given(rank, world_size, kinds):
    hardware = dataclasses.replace(generic("mine"), collectives=kinds)
    try:
        return hardware_of(dist.group.WORLD, CPU, 1 << 24, hardware).name
    except OsdpError as error:
        return str(error)


def test_what_is_given_is_taken_if_it_prices_what_the_group_needs(two_ranks):
    needed = {k: v for k, v in generic().collectives.items() if k != "reduce_scatter"}
    assert two_ranks.run(given, needed) == ["mine", "mine"]
    one, other = two_ranks.run(given, {})
    assert one == other
    assert "'mine' has no all_gather, all_to_all, all_reduce" in one and "torchrun" in one


def with_a_kernel(rank, world_size, folder):
    """What is found after a kernel's time was added: in this process, and in the next one."""
    found = []
    with (
        mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": folder}),
        mock.patch.object(profile_cache, "measure_hardware", lambda *_, **__: generic()),
        mock.patch.object(profile_cache, "rates_hold", lambda *_: True),
    ):
        with mock.patch.dict(profile_cache._in_process, clear=True):
            hardware = hardware_of(dist.group.WORLD, CPU, 1 << 24)
            more = dataclasses.replace(hardware, kernel_seconds={"aten.mm": 1.0})
            profile_cache.keep(more, dist.group.WORLD, CPU)
            found.append(hardware_of(dist.group.WORLD, CPU, 1 << 24).kernel_seconds)
        with mock.patch.dict(profile_cache._in_process, clear=True):
            found.append(hardware_of(dist.group.WORLD, CPU, 1 << 24).kernel_seconds)
    return found


def test_the_times_of_operators_are_kept_too(two_ranks, tmp_path):
    kernel = {"aten.mm": 1.0}
    assert two_ranks.run(with_a_kernel, str(tmp_path)) == [[kernel, kernel]] * 2
    assert len(files(tmp_path)) == 1
    # Where nothing is kept on disk it holds for the process.
    assert two_ranks.run(with_a_kernel, "") == [[kernel, {}]] * 2


def refused_and_planned(rank, world_size, folder):
    """The least limit that a refused one names; whether it works, as the first did not, next."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    given = torch.ones(64, 256)

    def first_call(limit_bytes):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="osdp", options={"memory_limit": limit_bytes})
        with mock.patch.dict(profile_cache._in_process, clear=True):  # as a run of its own
            compiled(given).sum().backward()

    # On a busy machine the kept rates may seem not to hold: the next call would measure anew.
    hold = mock.patch.object(profile_cache, "rates_hold", return_value=True)
    with mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": folder}), hold:
        with pytest.raises(InfeasibleLimit) as refused:
            first_call(5 << 20)  # two linears of 1 MiB, with their gradients and Adam's state
        (kept,) = files(Path(folder))
        kernels = len(json.loads(kept.read_text())["kernel_seconds"])
        first_call(refused.value.least_bytes)
    assert optimizer.param_groups
    return kernels, refused.value.least_bytes, plan_of(model).prediction.peak_bytes


@pytest.mark.thorough
def test_the_limit_that_an_error_names_works_in_the_next_run(two_ranks, tmp_path):
    """By the same profile: what was measured is kept although nothing was planned."""
    for kernels, least_bytes, peak_bytes in two_ranks.run(refused_and_planned, str(tmp_path)):
        assert kernels
        assert peak_bytes <= least_bytes


def along(rank, world_size, dimension):
    slow = LinkRate(latency_seconds=1.0, seconds_per_byte=1.0)
    rates = dict.fromkeys(generic().collectives, slow)
    hardware = dataclasses.replace(generic("mine"), dimensions={"dp": rates})
    found = hardware_of(dist.group.WORLD, CPU, 1 << 24, hardware, dimension)
    return found.collectives["all_gather"].latency_seconds


def test_a_mesh_dimension_has_its_own_rates_where_the_profile_has_them(two_ranks):
    assert two_ranks.run(along, "dp") == [1.0, 1.0]
    everywhere = generic().collectives["all_gather"].latency_seconds
    assert two_ranks.run(along, "tp") == two_ranks.run(along, None) == [everywhere] * 2


def measured_for_real(rank, world_size, folder):
    found = []
    with (
        mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": folder}),
        mock.patch.object(profile_cache, "rates_hold", lambda *_: True),  # on a busy machine
    ):
        for _ in range(2):
            with mock.patch.dict(profile_cache._in_process, clear=True):
                found.append(hardware_of(dist.group.WORLD, CPU, 1 << 24).to_dict())
    return found


def test_a_real_measurement_comes_back_as_it_was(two_ranks, tmp_path):
    one, other = two_ranks.run(measured_for_real, str(tmp_path))
    assert one[0] == one[1] == other[0] == other[1]
    assert Hardware.load(files(tmp_path)[0]).to_dict() == one[0]


def test_the_address_is_the_one_towards_the_first_rank(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert profile_cache.own_address() == ""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert profile_cache.own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no address")
    assert profile_cache.own_address() == ""


def test_where_profiles_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("OSDP_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("OSDP_CACHE_DIR", "")
    assert cache_folder() is None
    monkeypatch.delenv("OSDP_CACHE_DIR")
    assert cache_folder() == tmp_path / "shared" / "osdp_compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "osdp_compile"
