"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(folder: Path, cache: Path, ranks: int, script: str, *arguments: str) -> str:
    """What two ranks of an example print, run in a folder of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(EXAMPLES / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_a_pass_of_your_own(tmp_path, inductor_cache):
    lines = (EXAMPLES / "custom_pass.py").read_text().splitlines()
    assert len(lines) < 40
    printed = torchrun(tmp_path, inductor_cache, 2, "custom_pass.py")
    norms = {line.split(": ")[1] for line in printed.splitlines() if line.startswith("rank ")}
    assert len(norms) == 1, "ranks disagree"
    files = sorted((tmp_path / "graphs").iterdir())
    texts = {path.stem.split("-", 1)[1]: path.read_text() for path in files}
    names = list(texts)
    assert names.index("backward-half_gradients") == names.index("backward-shard") - 1
    sent = [line for line in texts["backward-reorder"].splitlines() if "# reduce" in line]
    assert sent and all(": bf16[" in line for line in sent)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_a_gpt(tmp_path, inductor_cache, ranks):
    small = ["--layers", "1", "--width", "64", "--steps", "3"]
    limit = ["--memory-limit", "8MiB", "--save-plan", "plan.json"] if ranks > 1 else []
    printed = torchrun(tmp_path, inductor_cache, ranks, "train_gpt.py", *small, *limit)
    assert "held-out loss" in printed and "measured" in printed
    assert ("predicted" in printed) == (ranks > 1)
    assert (tmp_path / "plan.json").exists() == (ranks > 1)
