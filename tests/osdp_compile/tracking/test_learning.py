"""Learning: a second start of the same model plans with what the first one measured."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from osdp_compile import plan_of, report
from osdp_compile.calibration import profile_cache
from osdp_compile.engine import plan_decision
from osdp_compile.tracking import step_trace
from osdp_compile.tracking.session import session_for
from osdp_compile.tracking.step_trace import TRACED_STEPS, WARM_STEPS
from passes.types.hardware import Hardware, generic
from passes.types.learned import Learned

STEPS = WARM_STEPS + TRACED_STEPS + 4
#: A machine of which the profile says that it computes and sends much faster than it does.
FAST = dataclasses.replace(
    generic("too fast"), flops_per_second={"default": 1e12}, memory_bytes_per_second=1e12
)


def start(options, steps=STEPS, width=512):
    """Train a new model as a run of its own. Its report, its corrections, and what was logged."""
    torch._dynamo.reset()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("osdp_compile")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    model = nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, width))
    optimizer = torch.optim.AdamW(model.parameters())
    given = torch.ones(256, width)
    try:
        with mock.patch.dict(profile_cache._in_process, clear=True):
            compiled = torch.compile(model, backend="osdp", options=options)
            for _ in range(steps):
                compiled(given).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return report(compiled), session_for(model).context.hardware.in_force, said, plan_of(model)


def on_a_machine(folder):
    """Measurements cost nothing, give one profile, and hold; no spread of steps is too large."""
    return (
        mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": folder}),
        mock.patch.object(profile_cache, "measure_hardware", lambda *_, **__: FAST),
        mock.patch.object(profile_cache, "rates_hold", lambda *_: True),
        mock.patch.object(plan_decision, "with_step_seconds", lambda _, ctx, *__: ctx.hardware),
        mock.patch.object(step_trace, "_MOST_SPREAD", float("inf")),
    )


def twice(rank, world_size, folder, starts):
    """Starts with (options, steps, width)."""
    a, b, c, d, e = on_a_machine(folder)
    with a, b, c, d, e:
        return [start(*one) for one in starts]


def error(said):
    """How far off a prediction is, as a factor above 1."""
    ratio = said.predicted_step_seconds / said.measured_parts.step_seconds
    return max(ratio, 1 / ratio)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def starts(two_ranks, folder):
    options = {"memory_limit": "40MiB"}
    return two_ranks.run(twice, str(folder), [(options,), (options,)])


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_second_start_plans_with_what_the_first_measured(starts):
    for (first, before, _, _), (second, learned, _, _) in starts:
        assert before == Learned() and learned.steps == TRACED_STEPS
        assert learned.kernel_factor > 1.5  # of a machine that was said to be much faster
        assert error(second) < error(first)
    assert starts[0][1][1] == starts[1][1][1]  # all ranks plan with the same
    assert starts[0][1][3] == starts[1][1][3]


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_rank_0_says_in_one_line_what_was_learned_and_what_it_plans_with(starts):
    (_, _, kept, _), (_, learned, planned, _) = starts[0]
    for said, words in ((kept, "learned from 8 steps"), (planned, "what 8 earlier steps taught")):
        assert sum(words in line for line in said) == 1
    assert any(str(learned) in line for line in planned)
    others = [line for _, _, said, _ in starts[1] for line in said]
    assert not any("learned" in line or "taught" in line for line in others)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_report_compares_each_part_of_the_step(starts):
    first, _, _, _ = starts[0][0]
    second, *_ = starts[0][1]
    parts = first.measured_parts
    assert parts.steps == TRACED_STEPS and first.learned == Learned()
    text = " ".join(str(second).split())
    for part in ("forward", "backward", "exposed communication", "optimizer and loop"):
        assert part in text
    assert "8 traced steps" in text and "predicted with what 8 steps taught" in text
    assert parts.step_seconds == pytest.approx(first.measured_step_seconds, rel=0.9)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_few_steps_another_model_and_a_given_profile_learn_nothing(two_ranks, folder, starts):
    (path,) = Path(folder).glob("*.json")
    before = json.loads(path.read_text())["learned"]
    assert len(before) == 1
    given = {"memory_limit": "40MiB", "hardware": FAST}
    limit = {"memory_limit": "40MiB"}
    (few, other, own), _ = two_ranks.run(
        twice, str(folder), [(limit, WARM_STEPS + TRACED_STEPS, 256), (limit, 1, 128), (given,)]
    )
    assert json.loads(path.read_text())["learned"] == before
    assert {few[1], other[1], own[1]} == {Learned()}
    assert own[0].measured_parts.steps == TRACED_STEPS  # it is compared all the same


def kept(rank, world_size, folder, change):
    """Whether a correction is kept after a change of the file."""
    a, b, c, d, e = on_a_machine(folder)
    group, cpu = torch.distributed.group.WORLD, torch.device("cpu")
    with a, b, c, d, e, mock.patch.dict(profile_cache._in_process, clear=True):
        hardware = profile_cache.hardware_of(group, cpu, 1 << 24)
        if rank:
            return None
        (path,) = Path(folder).iterdir()
        if change == "deleted":
            path.unlink()
        elif change == "measured anew":
            dataclasses.replace(hardware, launch_seconds=1.0).save(path)
        elif change == "another job":
            dataclasses.replace(
                hardware, kernel_seconds={"aten.mm": 1.0}, learned={"theirs": Learned(8, 2.0)}
            ).save(path)
        result = profile_cache.keep_learned(Learned(8, 3.0), "ours", hardware, group, cpu)
        assert (result is None) == (change in ("deleted", "measured anew"))
        return sorted(Hardware.load(path).learned) if path.exists() else None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("", ["ours"]),
        ("another job", ["ours", "theirs"]),
        ("measured anew", []),
        ("deleted", None),
    ],
)
def test_the_file_is_read_again_and_another_measurement_learns_nothing(
    two_ranks, tmp_path, change, found
):
    assert two_ranks.run(kept, str(tmp_path), change)[0] == found
