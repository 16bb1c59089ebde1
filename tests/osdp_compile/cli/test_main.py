"""The command line: ``osdp calibrate`` on ranks and alone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest

import osdp_compile
from osdp_compile.cli.arguments import SEARCHES
from osdp_compile.cli.main import main
from osdp_compile.options import Search
from passes.types.hardware import Hardware

ROOT = Path(__file__).parents[3]
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


WITHOUT_TORCH = """
import sys
from osdp_compile.cli.main import main
try:
    main({arguments})
except SystemExit as stop:
    assert stop.code == {code}, stop.code
assert "torch" not in sys.modules and "rich" not in sys.modules
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "measure this machine and its network"),
        (["plan", "--help"], 0, "--batch-sizes"),
        (["--version"], 0, f"(torch {metadata.version('torch')}, Python 3."),
        (["plan", "--hardware", "h100-sxm", "--memory-limit", "8"], 2, "did you mean '8GiB'?"),
    ],
)
def test_what_needs_no_torch_is_answered_without_importing_it(arguments, code, said):
    script = WITHOUT_TORCH.format(arguments=arguments, code=code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout + ran.stderr


def test_the_searches_that_the_command_offers_are_those_there_are():
    assert get_args(Search) == SEARCHES


def test_the_package_has_its_names_when_they_are_asked_for():
    names = set(osdp_compile.__all__)
    assert names <= set(dir(osdp_compile)) and set(osdp_compile._MODULES) == names
    importlib.import_module("osdp_compile.full_parameters")  # a module of a function's name
    for name in names:
        assert getattr(osdp_compile, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        osdp_compile.nothing  # noqa: B018


@pytest.mark.thorough
def test_two_ranks_write_one_profile_and_print_one_table(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "osdp_compile", "calibrate"]
    command += ["--out", "profiles/here.json", "--seconds", "3", "--memory", "32MiB"]
    command += ["--mesh", "host=2,core=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, "--device", "cpu"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    hardware = Hardware.load(tmp_path / "profiles" / "here.json")
    assert hardware.name == "measured cpu gloo x2"
    assert set(hardware.collectives) == set(KINDS)
    assert set(hardware.dimensions) == {"host"}  # one rank alone has nothing to measure
    for word in (*KINDS, "all_reduce inside", "bandwidth", "median", "worst", "GFLOP/s"):
        assert word in ran.stdout
    assert ran.stdout.count("Written to profiles/here.json") == 1


def test_one_process_says_that_there_are_no_collectives(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "one.json"
    given = ["--out", str(out), "--seconds", "0.2", "--memory", "8MiB", "--device", "cpu"]
    assert main(["calibrate", *given]) == 0
    assert Hardware.load(out).collectives == {}
    assert "no collectives were measured" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "profile.json"
    assert main(["calibrate", "--out", str(out), "--seconds", "1000", "--device", "cpu"]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_mesh_of_other_ranks_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "one.json"
    assert main(["calibrate", "--out", str(out), "--device", "cpu", "--mesh", "a=2,b=4"]) == 1
    assert "--mesh is 2 x 4 ranks, and there are 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--seconds", "soon"], "'soon' is not a number of seconds"),
        (["--seconds", "-1"], "not a number of seconds above zero"),
        (["--memory", "8 gallons"], "'8 gallons' is not a size"),
        (["--mesh", "2x8"], "'2x8' is not like host=2,gpu=8"),
        (["--mesh", "a=2,a=2"], "'a=2,a=2' is not like host=2,gpu=8"),
        (["--mesh", "a=0"], "'a=0' is not like host=2,gpu=8"),
    ],
)
def test_malformed_arguments_are_named(given, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", "--out", "profile.json", *given])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
