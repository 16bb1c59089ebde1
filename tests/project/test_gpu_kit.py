"""The proof kit for GPUs runs on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import predictions
from benchmarks.gpu.__main__ import Setting, run_parts
from benchmarks.gpu.deadline import Deadline, TimeUpError
from benchmarks.gpu.overlap import common, united
from benchmarks.launch import ROOT


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_dry_run(tmp_path, inductor_cache):
    out = tmp_path / "gpu.json"
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry", "--minutes", "30", "--out", str(out)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert {one["part"] for one in record["checks"]} == set(record["seconds"])
    ddp, limited = record["against DDP"]
    assert limited["losses"] == pytest.approx(ddp["losses"], abs=1e-4)
    assert limited["peak_bytes"] <= limited["limit_bytes"] < ddp["peak_bytes"]
    for plan in record["predictions"]:
        assert 0.95 <= plan["measured_bytes"] / plan["predicted_bytes"] <= 1


@pytest.mark.thorough
def test_a_machine_without_gpus_is_told_of_the_dry_run():
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--dry runs the kit on CPUs" in done.stderr


_WAITS = "import time; time.sleep(60)"
_STARTS_ANOTHER = f"""
import pathlib, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", {_WAITS!r}])
pathlib.Path(sys.argv[1]).write_text(str(other.pid))
{_WAITS}
"""


def _runs(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.thorough
def test_a_command_ends_with_its_children_when_the_time_is_up(tmp_path):
    other = tmp_path / "pid"
    deadline, begin = Deadline(5.0), time.monotonic()
    with pytest.raises(TimeUpError, match="not done"):
        deadline.run([sys.executable, "-c", _STARTS_ANOTHER, str(other)])
    assert time.monotonic() - begin < 30
    while _runs(other.read_text()):
        assert time.monotonic() - begin < 50
        time.sleep(0.1)
    with pytest.raises(TimeUpError, match="not started"):
        deadline.run([sys.executable, "-c", "print(1)"])


def test_what_was_not_done_in_time_fails(tmp_path):
    out, record = tmp_path / "gpu.json", {"seconds": {}}
    setting = Setting("cpu", 0, True, 1, None, Deadline(0.0))
    (check,) = run_parts(setting, ["tests"], record, out, Console(quiet=True))
    assert (check.holds, check.found) == (False, "not started: the time was up (--minutes)")
    assert json.loads(out.read_text())["checks"][0]["holds"] is False


def test_overlap_of_spans():
    spans = united([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    assert spans == [(0.0, 2.0), (3.0, 4.0)]
    assert common(spans, [(1.0, 3.5)]) == 1.5


def _row(key, device, own_us, all_us, is_user_annotation=False):
    return SimpleNamespace(
        key=key,
        device_type=SimpleNamespace(name=device),
        self_device_time_total=own_us,
        device_time_total=all_us,
        is_user_annotation=is_user_annotation,
    )


def test_kernels_that_collectives_start_do_not_count():
    rows = [
        _row("gemm", "CUDA", 30.0, 30.0),
        _row("copy", "CUDA", 12.0, 12.0),
        _row("osdp: gather", "CUDA", 50.0, 50.0, is_user_annotation=True),
        _row("_c10d_functional::all_gather_into_tensor", "CPU", 0.0, 12.0),
        _row("aten::mm", "CPU", 0.0, 30.0),
    ]
    with mock.patch("torch.profiler.profile") as profile, mock.patch("torch.cuda.synchronize"):
        profile.return_value.__enter__.return_value.key_averages.return_value = rows
        assert predictions._kernels_seconds(lambda: None) == pytest.approx(30e-6)
    with mock.patch("torch.cuda.synchronize"):  # the names that it reads are the profiler's
        assert predictions._kernels_seconds(lambda: torch.ones(2).sum()) == 0.0
