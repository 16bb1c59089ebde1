"""What two real ranks print and trace, compiled by Inductor: rank 0 its log, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import free_port

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="osdp", options={"hardware": "cpu-gloo"}, dynamic=False)
for rows in (8, 8, 12):
    compiled(torch.randn(rows, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def printed_by_ranks(cache: Path, **variables: str) -> list[str]:
    """What each of two ranks prints: standard output, then standard error."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    given |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    given |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **given, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = ["".join(process.communicate(timeout=550)) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    return printed


@pytest.mark.thorough
def test_an_ordinary_run_prints_its_plan_on_rank_zero_and_no_warning(inductor_cache):
    of_zero, of_one = printed_by_ranks(inductor_cache)
    assert of_one == ""
    starts = ("[osdp] ", "┏", "┃", "┡", "│", "└", "predicted ")
    assert of_zero and not [x for x in of_zero.splitlines() if not x.startswith(starts)]
    assert "[osdp] osdp plan for 2 ranks" in of_zero and "compiled again in" in of_zero


@pytest.mark.thorough
def test_torch_logs_and_torch_trace_of_two_ranks(inductor_cache, tmp_path):
    variables = {"TORCH_LOGS": "graph_breaks,osdp", "TORCH_TRACE": str(tmp_path)}
    of_zero, of_one = printed_by_ranks(inductor_cache, **variables)
    assert of_one == ""
    lines = of_zero.splitlines()
    assert lines and not [line for line in lines if not line.startswith("[rank0]:I")]
    for event in ("planning", "osdp plan for 2 ranks", "compiled in", "compiled again in"):
        assert len([line for line in lines if event in line]) == 1 + (event == "planning"), event
    for rank in range(2):
        (file,) = tmp_path.glob(f"*_rank_{rank}_*")
        text = file.read_text()
        for name in ("osdp_plan", "osdp_forward_schedule", "osdp_backward_schedule"):
            # one for each of the two compilations
            assert text.count(f'"name": "{name}"') == 2
