"""Ranks that die or hang in the middle of training: an error on the others, and no hang."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile import Plan
from tests.ranks import RankFailed, Ranks
from tests.training import SLOW, normal_batch

TIMEOUT_SECONDS = 3.0


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train_until(rank, world_size, decision, fails, when):
    """Train on a group that waits for a few seconds; rank 1 fails in the third step."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))
    model = two_layers()
    plan = Plan.uniform(model.named_parameters(), decision, world_size=world_size)
    options = {"plan": plan, "hardware": SLOW, "mesh": DeviceMesh.from_group(group, "cpu")}
    compiled = torch.compile(model, backend="osdp", options=options)
    for step in range(4):
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
            assert step == 2 and waited < 3 * TIMEOUT_SECONDS, f"step {step}, {waited:.1f} s"
            if fails is die:  # what is returned is lost: the other one returns nothing
                raise ZeroDivisionError("told in the third step") from error
            return str(error)
    return "trained to the end"


def die():
    os._exit(3)


def hang():
    time.sleep(2 * TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("decision", "when"),
    [("shard_again", "forward"), ("shard_again", "backward"), ("replicate", "backward")],
)
def test_a_rank_that_dies_is_an_error_on_the_others(inductor_cache, decision, when):
    with Ranks(2, inductor_cache) as ranks:
        with pytest.raises(RankFailed, match="rank 1: the process died") as failed:
            ranks.run(train_until, decision, die, when)
        assert "ZeroDivisionError: told in the third step" in str(failed.value)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_hangs_is_an_error_on_the_others(inductor_cache, when):
    with Ranks(2, inductor_cache) as ranks:
        said, _ = ranks.run(train_until, "shard_again", hang, when)
        assert "Timed out" in said or "imeout" in said, said
