"""``osdp doctor``: what a machine has, and what will not work."""

from __future__ import annotations

import dataclasses
import subprocess
from unittest import mock

import pytest
import torch

from osdp_compile.cli import doctor
from osdp_compile.cli.main import main


def levels() -> dict[str, str]:
    return {one.subject: one.level for one in doctor.found()}


def compiled(returncode: int, stderr: str = ""):
    done = subprocess.CompletedProcess([], returncode, "", stderr)
    return mock.patch("osdp_compile.cli.doctor.subprocess.run", lambda *_, **__: done)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OSDP_CACHE_DIR", str(tmp_path / "profiles"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.thorough
def test_it_says_what_is_there(capsys):
    assert main(["doctor"]) == 0  # with a function that is really compiled
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__.split('+')[0]}" in printed
    assert "gloo" in printed and "no problems found" in printed


def test_a_compiler_that_does_not_work_is_a_problem(capsys):
    with compiled(1, "Traceback\n  torch._inductor.exc.InvalidCxxCompiler: Error: no g++\n"):
        assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "no g++" in printed and "CXX" in printed and "1 problem\n" in printed


def test_a_torch_that_is_too_old_is_a_problem_and_a_newer_one_is_noted(monkeypatch):
    with compiled(0):
        monkeypatch.setattr(torch, "__version__", "2.4.0")
        assert levels()["versions"] == "problem"
        monkeypatch.setattr(torch, "__version__", "9.9.0")
        assert levels()["versions"] == "note"


def test_a_profile_says_what_it_has_learned(tmp_path):
    from passes.types.hardware import generic
    from passes.types.learned import Learned

    (tmp_path / "profiles").mkdir()
    profile = dataclasses.replace(generic(), learned={"a step": Learned(8, kernel_factor=1.5)})
    profile.save(tmp_path / "profiles" / "a.json")
    with compiled(0):
        (found,) = [one for one in doctor.found() if one.subject == "profiles"]
    assert "learned from 8 steps: torch's kernels x1.50" in found.text


@pytest.mark.parametrize("built", [True, False])
def test_it_says_which_cudnn_decides_in_plans_for_gpus(monkeypatch, built):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92345)
    with compiled(0):
        (found,) = (one for one in doctor.found() if one.subject == "plans for GPUs")
    assert found.level == "ok"
    assert ("cuDNN 9.23 of this torch" if built else "cuDNN 9.19 is assumed") in found.text


def test_profiles_are_listed_and_other_files_named(tmp_path):
    from passes.types.hardware import generic

    (tmp_path / "profiles").mkdir()
    generic(name="four old laptops").save(tmp_path / "profiles" / "a.json")
    (tmp_path / "profiles" / "b.json").write_text("{}")
    with compiled(0):
        (found,) = [one for one in doctor.found() if one.subject == "profiles"]
    assert "2 in" in found.text and "a.json: four old laptops" in found.text
    assert "b.json: not a profile of this version" in found.text


def test_ranks_without_a_process_group_are_noted(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with compiled(0):
        assert "WORLD_SIZE=4" in [one.text for one in doctor.found() if one.level == "note"]
