"""Errors that nobody catches: what a person sees of them on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

def train_step(model):
    return model(torch.ones(2, 8)).sum()

if {ranks} > 1:
    dist.init_process_group("gloo")
options = {{"memory_limit": {limit!r}, "hardware": "cpu-gloo"}}
train_step(torch.compile(nn.Linear(8, 8), backend="osdp", options=options))
"""


def failed(folder: Path, limit: str, ranks: int) -> str:
    """What a script prints whose limit is refused."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(limit=limit, ranks=ranks))
    command = [sys.executable, str(script)]
    if ranks > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(ranks), str(script)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=200)
    assert ran.returncode != 0
    return ran.stderr


@pytest.mark.thorough
def test_rank_zero_says_it_first_once_and_torchrun_says_it_last(tmp_path):
    printed = failed(tmp_path, "60kB", ranks=2).splitlines()
    # A busy machine takes long enough for lines of progress.
    said = [line for line in printed if not line.startswith("[osdp] first call:")]
    sentence = "osdp_compile.errors.InfeasibleLimit: memory_limit=60 kB is below the least possible"
    places = [index for index, line in enumerate(said) if "below the least possible" in line]
    assert places[0] == 0 and said[0].startswith(sentence) and said[0].endswith("more ranks.")
    assert "train.py" in said[1] and "in train_step" in "".join(said[2:7]), "no frames of the user"
    assert places[1:] == [len(said) - 2], "torchrun's summary does not end with it"
    assert not any("osdp_compile/" in line or "_dynamo" in line for line in said)


@pytest.mark.thorough
def test_alone_it_is_the_sentence_and_the_users_own_lines(tmp_path):
    said = failed(tmp_path, "8", ranks=1).splitlines()
    sentence = "option 'memory_limit': '8' is 8 bytes: did you mean"
    assert said[0].startswith(f"osdp_compile.errors.OptionError: {sentence}")
    assert len(said) <= 7 and "train_step" in "".join(said)


def test_other_errors_are_printed_as_before(monkeypatch, capsys):
    from osdp_compile.engine import uncaught

    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error))
    uncaught._print_briefly()
    sys.excepthook(KeyError, KeyError("x"), None)
    assert [kind for kind, _, _ in printed] == [KeyError]
    assert capsys.readouterr().err == ""


def test_an_error_that_is_caught_has_its_type_and_text_and_can_be_sent(monkeypatch):
    import pickle

    from osdp_compile import InfeasibleLimit
    from osdp_compile.engine.uncaught import Brief, raise_briefly

    monkeypatch.delenv("OSDP_DEBUG", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(InfeasibleLimit) as caught:
        raise_briefly(InfeasibleLimit("too low", 3))
    caught.value.args = ("too low\n\nSet TORCHDYNAMO_VERBOSE=1",)  # as Dynamo does
    assert str(caught.value) == "too low" and caught.value.least_bytes == 3
    sent = pickle.loads(pickle.dumps(caught.value))
    assert type(sent) is InfeasibleLimit and str(sent) == "too low" and sent.least_bytes == 3
    monkeypatch.setenv("OSDP_DEBUG", "1")
    with pytest.raises(InfeasibleLimit) as caught:
        raise_briefly(InfeasibleLimit("too low", 3))
    assert not isinstance(caught.value, Brief), "with OSDP_DEBUG all frames are shown"
