"""Errors that nobody catches: what a person sees of them on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    return run(folder, SCRIPT.format(limit=limit, ranks=ranks), ranks)


def run(folder: Path, text: str, ranks: int) -> str:
    """What a script prints that fails."""
    script = folder / "train.py"
    script.write_text(text)
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
    uncaught.print_for_users()
    sys.excepthook(KeyError, KeyError("x"), None)
    assert [kind for kind, _, _ in printed] == [KeyError]
    assert capsys.readouterr().err == ""


AVERAGE = """
import copy
import torch
import torch.distributed as dist
from osdp_compile import Plan
from torch import nn

dist.init_process_group("gloo")
model = nn.Linear(8, 8)
average = copy.deepcopy(model).requires_grad_(False)
plan = Plan.uniform(model.named_parameters(), "shard_keep", world_size=2)
options = {"plan": plan, "hardware": "cpu-gloo"}
compiled = torch.compile(model, backend="osdp", options=options)
compiled(torch.ones(2, 8)).sum().backward()
with torch.no_grad():
    average.weight.lerp_(model.weight, 0.1)
"""


@pytest.mark.thorough
def test_an_average_of_a_copy_from_before_is_told_what_to_do(tmp_path):
    said = run(tmp_path, AVERAGE, ranks=2)
    assert "got mixed torch.Tensor and DTensor" in said
    assert "[osdp] since the first call parameters are DTensors" in said
    assert "an average (EMA) of it" in said and "osdp_compile.shard" in said


def messages_of_dtensors():
    """What torch says of DTensors here, by the operation."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from osdp_compile.trace import fake_world

    with fake_world(2):
        sharded = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)))
        for operation in (lambda: torch.ones(4, 4).add_(sharded), sharded.numpy, sharded.tolist):
            with pytest.raises(Exception) as raised:
                operation()
            yield raised.value
        try:
            sharded[1] = 2.0  # torch 2.15 does
        except NotImplementedError as error:
            yield error


def test_errors_of_torch_about_dtensors_get_a_hint(monkeypatch, capsys):
    from osdp_compile.engine import uncaught

    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    uncaught.print_for_users()
    for error in messages_of_dtensors():
        sys.excepthook(type(error), error, None)
        said = capsys.readouterr().err
        assert "[osdp] since the first call parameters are DTensors" in said, error


def test_a_model_that_pickle_refuses_gets_a_hint(monkeypatch, capsys):
    import pickle

    from osdp_compile.engine import uncaught
    from osdp_compile.model.mixed_precision import subclass

    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    uncaught.print_for_users()
    module = torch.nn.Linear(2, 2)
    reader = property(lambda one: one._parameters["weight"])
    subclass(module, {"weight": reader})  # as a sharded one
    with pytest.raises(pickle.PicklingError) as raised:
        pickle.dumps(module)
    sys.excepthook(raised.type, raised.value, None)
    assert "save model.state_dict() in place of the model" in capsys.readouterr().err


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
