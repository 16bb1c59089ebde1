"""The proof kit for GPUs runs on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu.overlap import common, united
from benchmarks.launch import ROOT


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_dry_run(tmp_path, inductor_cache):
    out = tmp_path / "gpu.json"
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(out)],
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


def test_overlap_of_spans():
    spans = united([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    assert spans == [(0.0, 2.0), (3.0, 4.0)]
    assert common(spans, [(1.0, 3.5)]) == 1.5
