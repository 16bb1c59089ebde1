"""A second start finds the plan and the compiled graphs of the first."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import osdp_compile
from osdp_compile.engine import first_call, plan_decision
from osdp_compile.planning.traced_step import planned_whole
from osdp_compile.tracking.other_models import OtherModels
from tests.ranks import Ranks
from tests.training import SLOW


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def started(rank, world_size, folder, limit, rows=8):
    """One start: losses, lines of the log, calls of the planner, the plan, cache hits, misses."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("osdp_compile")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"memory_limit": limit, "hardware": SLOW}
    compiled = torch.compile(model, backend="osdp", options=options)
    losses = []
    planner = mock.patch.object(plan_decision, "planned_whole", wraps=planned_whole)
    try:
        with mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": folder}), planner as planned:
            for step in range(3):
                torch.manual_seed(10 * step + rank)
                loss = compiled(torch.randn(rows, 64))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    found = counters["inductor"]
    hits = found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], found["fxgraph_cache_bypass"]
    return losses, said, planned.call_count, osdp_compile.plan_of(model), hits


def says_found(said):
    return any("plan found" in line for line in said)


@pytest.mark.thorough
def test_a_second_start_finds_plan_and_code(inductor_cache, tmp_path):
    """In processes of its own: the keys hold no address and no hash of one process."""
    starts = []
    for _ in range(2):
        with Ranks(2, inductor_cache) as ranks:
            starts.append(ranks.run(started, str(tmp_path), "800KiB"))
    (first, first_other), (second, second_other) = starts
    assert (first[2], first_other[2]) == (1, 0)
    assert (second[2], second_other[2]) == (0, 0)
    assert not says_found(first[1]) and says_found(second[1]) and not says_found(second_other[1])
    assert first[3] == first_other[3] == second[3] == second_other[3]
    assert (first[0], first_other[0]) == (second[0], second_other[0])
    assert second[4] == second_other[4] == (2, 0, 0)


def planner_calls(rank, world_size, folder, starts):
    """Calls of the planner in each start, which ends before the model is sharded.

    ``starts``: the limit and the rows of each; "damage": cut all kept plans short before the next.
    """
    counts = []
    alone = mock.patch.object(first_call, "other_models", lambda *_: OtherModels())
    stop = mock.patch.object(first_call, "register_group", side_effect=RuntimeError("decided"))
    planner = mock.patch.object(plan_decision, "planned_whole", wraps=planned_whole)
    with mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": folder}), alone, stop, planner as planned:
        for start in starts:
            if start == "damage":
                for path in Path(folder).glob("plans/*.json") if rank == 0 else ():
                    path.write_bytes(path.read_bytes()[:-10])
                continue
            limit, rows = start
            torch._dynamo.reset()
            options = {"memory_limit": limit, "hardware": SLOW}
            compiled = torch.compile(Mlp(), backend="osdp", options=options)
            before = planned.call_count
            with pytest.raises(Exception, match="decided"):
                compiled(torch.randn(rows, 64))
            counts.append(planned.call_count - before)
    return counts


@pytest.mark.thorough
def test_another_limit_or_batch_is_planned_and_a_damaged_plan_too(two_ranks, tmp_path):
    first = ("800KiB", 8)
    starts = [first, first, ("900KiB", 8), ("800KiB", 16), first, "damage", first, first]
    counts, other = two_ranks.run(planner_calls, str(tmp_path), starts)
    assert counts == [1, 0, 1, 1, 0, 1, 0] and not any(other)
