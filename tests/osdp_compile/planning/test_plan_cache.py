"""Kept plans: found for equal inputs, not for others, and dropped where they are of no use."""

from __future__ import annotations

import dataclasses
import logging
import os
from unittest import mock

import pytest
import torch

from osdp_compile.planning import plan_cache
from osdp_compile.planning.plan_cache import find, keep, pass_lines, path_of, source_digest
from osdp_compile.planning.step_key import Uncertain
from passes.pipeline import Pass, Stage, default_passes
from passes.types.context import Context, MeshDim, Parameter
from passes.types.decision import Decision
from passes.types.hardware import generic
from passes.types.learned import Learned
from passes.types.plan import Plan, Prediction

WEIGHT = Parameter("weight", (8, 8), "float32", 64, 4, True, 512)
HARDWARE = dataclasses.replace(generic(), kernel_seconds={"aten.mm": 0.1 + 0.2})
CONTEXT = Context(Plan((), world_size=2), HARDWARE, (WEIGHT,), 2, 0, "0", limit_bytes=1 << 20)
PLAN = Plan.uniform([("weight", torch.empty(8, 8))], Decision.SHARD_KEEP, world_size=2).replace(
    prediction=Prediction(0.1 + 0.2, 1 / 3, 1e-9, 5, {"parameters": 5})
)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OSDP_CACHE_DIR", str(tmp_path))


@pytest.fixture
def path():
    path = path_of(["step"], CONTEXT)
    keep(PLAN, CONTEXT, path)
    return path


def test_a_kept_plan_is_found_as_it_was(path, caplog):
    with caplog.at_level(logging.INFO, "osdp_compile"):
        assert find(path_of(["step"], CONTEXT), CONTEXT).plan == PLAN
    assert [f"plan found: {path}" in one for one in caplog.messages] == [True]


def changed_hardware():
    return dataclasses.replace(HARDWARE, memory_bytes_per_second=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"limit_bytes": 1 << 21},
        {"world_size": 4},
        {"parameters": (dataclasses.replace(WEIGHT, optimizer_bytes=256),)},
        {"parameters": (dataclasses.replace(WEIGHT, shape=(4, 16)),)},
        {"hardware": changed_hardware()},
        {"base_bytes": 1},
        {"uses_p2p": True},
        {"param_dtype": torch.bfloat16},
        {"mesh_dims": (MeshDim("host", 2, "1"), MeshDim("gpu", 1, "2"))},
    ],
)
def test_another_context_is_another_plan(path, changes):
    assert path_of(["step"], CONTEXT.replace(**changes)) != path


def test_every_field_of_a_context_is_in_the_key():
    lines = plan_cache.context_lines(CONTEXT)
    names = [field.name for field in dataclasses.fields(Context)]
    assert [line.partition(":")[0] for line in lines] == names


def test_another_step_source_or_torch_is_another_plan(path, monkeypatch):
    assert path_of(["another step"], CONTEXT) != path
    with mock.patch.object(plan_cache, "source_digest", lambda: "another"):
        assert path_of(["step"], CONTEXT) != path
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert path_of(["step"], CONTEXT) != path


def test_the_names_of_process_groups_do_not_matter(path):
    assert path_of(["step"], CONTEXT.replace(group_name="7")) == path


def test_the_source_of_both_packages_is_in_the_digest(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(plan_cache, "_PACKAGES", (package,))
    found = []
    for text in ("one = 1", "one = 2"):
        (package / "file.py").write_text(text)
        source_digest.cache_clear()
        found.append(source_digest())
    source_digest.cache_clear()
    assert found[0] != found[1]


def test_a_pass_of_a_user_is_in_no_key():
    assert len(pass_lines(default_passes())) == len(default_passes())
    with pytest.raises(Uncertain, match="mine"):
        pass_lines([Pass("mine", lambda gm, ctx: gm, stage=Stage.PARTS)])


def test_what_other_steps_have_taught_does_not_matter(path):
    taught = Learned(steps=4, kernel_factor=2.0)
    others = dataclasses.replace(HARDWARE, learned={"another": taught})
    assert path_of(["step"], CONTEXT.replace(hardware=others)) == path
    own = dataclasses.replace(HARDWARE, learned={"own": taught}).for_step("own")
    assert path_of(["step"], CONTEXT.replace(hardware=own)) != path


def test_times_of_more_operators_do_not_matter_and_other_times_do(path):
    times = HARDWARE.kernel_seconds
    for known, is_found in (({**times, "aten.add": 1.0}, True), ({"aten.mm": 1.0}, False)):
        ctx = CONTEXT.replace(hardware=dataclasses.replace(HARDWARE, kernel_seconds=known))
        assert path_of(["step"], ctx) == path
        kept = find(path, ctx)
        assert (kept is not None and kept.plan == PLAN) is is_found


def test_a_plan_is_found_with_the_workspaces_that_it_was_made_with(path):
    workspaces = {"aten.convolution": 1 << 20}
    measured = CONTEXT.replace(workspaces=workspaces)
    assert path_of(["step"], measured) == path
    keep(PLAN, measured, path)
    assert find(path, CONTEXT).workspaces == workspaces


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "changed": lambda data: data.replace(b"weight", b"height"),
    "empty": lambda data: b"",
    "binary": lambda data: b"\xff\xfe",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_is_dropped(path, caplog, damage):
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with caplog.at_level(logging.INFO, "osdp_compile"):
        assert find(path, CONTEXT) is None
    assert len(caplog.messages) == 1 and "dropped" in caplog.text
    assert not path.exists()


def test_a_plan_of_another_model_is_dropped(path, caplog):
    other = CONTEXT.replace(parameters=(dataclasses.replace(WEIGHT, name="bias"),))
    with caplog.at_level(logging.INFO, "osdp_compile"):
        assert find(path, other) is None
    assert "'bias' is not in the plan" in caplog.text and not path.exists()


def test_a_plan_of_another_user_or_that_others_may_write_is_dropped(path, caplog):
    with caplog.at_level(logging.INFO, "osdp_compile"):
        path.chmod(0o602)
        assert find(path, CONTEXT) is None and not path.exists()
        keep(PLAN, CONTEXT, path)
        with mock.patch.object(os, "geteuid", lambda: os.getuid() + 1):
            assert find(path, CONTEXT) is None and not path.exists()
    first, second = caplog.messages
    assert "other users may write it" in first and "belongs to another user" in second


def test_the_longest_unused_plans_go(path, monkeypatch):
    size = path.stat().st_size
    monkeypatch.setattr(plan_cache, "_MOST_BYTES", 2 * size + size // 2)
    other, third = (path.with_name(f"{name}.json") for name in ("other", "third"))
    keep(PLAN, CONTEXT, other)
    os.utime(path, (1, 1))
    os.utime(other, (2, 2))
    find(path, CONTEXT)  # used just now
    keep(PLAN, CONTEXT, third)
    assert path.exists() and third.exists() and not other.exists()


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OSDP_CACHE_DIR", str(tmp_path / "file"))
    path = path_of(["step"], CONTEXT)
    with caplog.at_level(logging.INFO, "osdp_compile"):
        keep(PLAN, CONTEXT, path)
    assert "the plan is not kept" in caplog.text


def test_without_a_folder_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("OSDP_CACHE_DIR", "")
    assert path_of(["step"], CONTEXT) is None
