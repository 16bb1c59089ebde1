"""Ranks that die or hang in the middle of training: an error on the others, and no hang."""

from __future__ import annotations

import datetime
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile import Plan, plan_of
from osdp_compile.lowering.lower import lower
from tests.chosen import thorough
from tests.ranks import RankFailed, Ranks
from tests.training import SLOW, normal_batch

pytestmark = pytest.mark.ranks

TIMEOUT_SECONDS = 3.0
#: The timeout, and what a busy machine makes of it; without one it is half an hour.
PROMPT_SECONDS = 60.0


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def lower_together(*args):
    """One rank may compile for seconds longer: none runs before all have compiled."""
    lowered = lower(*args)
    dist.barrier()
    return lowered


def compiled_on(group, plan):
    model = two_layers()
    options = {"plan": plan, "hardware": SLOW, "mesh": DeviceMesh.from_group(group, "cpu")}
    return model, torch.compile(model, backend="osdp", options=options)


def train_until(rank, world_size, decision, fails, when):
    """Rank 1 fails in the third step; where it hangs, the group waits for a few seconds only."""
    plan = Plan.uniform(two_layers().named_parameters(), decision, world_size=world_size)
    group = dist.new_group()
    if fails is hang:
        # Planning takes rank 0 seconds, too: this plan is complete, and nothing is left to plan.
        model, compiled = compiled_on(group, plan)
        compiled(normal_batch(0, 0, rank)).square().mean().backward()
        plan = plan_of(model)
        group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))
    model, compiled = compiled_on(group, plan)
    with mock.patch("osdp_compile.engine.backend.lower", lower_together):
        return run_until(rank, model, compiled, fails, when)


def run_until(rank, model, compiled, fails, when):
    for step in range(4):
        dist.barrier()
        begun = time.monotonic()
        try:
            if (rank, step, when) == (1, 2, "forward"):
                fails()
            loss = compiled(normal_batch(step, 0, rank)).square().mean()
            if (rank, step, when) == (1, 2, "backward"):
                fails()
            loss.backward()
            model.zero_grad()
        except RuntimeError as error:
            waited = time.monotonic() - begun
            assert step == 2 and waited < PROMPT_SECONDS, f"step {step}, {waited:.1f} s"
            told().set("told", "1")
            if fails is die:  # what is returned is lost: the other one returns nothing
                raise ZeroDivisionError("told in the third step") from error
            return str(error)
    return "trained to the end"


def die():
    os._exit(3)


def hang():
    """Until the other rank was told, or for longer than it may take."""
    told().wait(["told"], datetime.timedelta(seconds=2 * PROMPT_SECONDS))


def told():
    return dist.distributed_c10d._get_default_store()


@pytest.mark.parametrize(
    ("decision", "when"),
    [
        *thorough(("shard_regather", "forward")),
        ("shard_regather", "backward"),
        *thorough(("replicate", "backward")),
    ],
)
def test_a_rank_that_dies_is_an_error_on_the_others(inductor_cache, decision, when):
    with Ranks(2, inductor_cache) as ranks:
        with pytest.raises(RankFailed, match="rank 1: the process died") as failed:
            ranks.run(train_until, decision, die, when)
        assert "ZeroDivisionError: told in the third step" in str(failed.value)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_hangs_is_an_error_on_the_others(inductor_cache, when):
    with Ranks(2, inductor_cache) as ranks:
        said, _ = ranks.run(train_until, "shard_regather", hang, when)
        assert "Timed out" in said or "imeout" in said, said
