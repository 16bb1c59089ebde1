"""A second start finds the plan and the compiled graphs of the first."""

from __future__ import annotations

import logging
import os
from unittest import mock

import torch
from torch import nn
from torch._dynamo.utils import counters

import osdp_compile
from osdp_compile.engine import first_call
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
    planner = mock.patch.object(first_call, "planned_whole", wraps=first_call.planned_whole)
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


def test_another_limit_or_batch_is_planned_and_a_damaged_plan_too(two_ranks, tmp_path):
    def plans(**given):
        return two_ranks.run(started, str(tmp_path), **{"limit": "800KiB", **given})[0][2]

    assert plans() == 1 and plans() == 0
    assert plans(limit="900KiB") == 1
    assert plans(rows=16) == 1
    for path in (tmp_path / "plans").iterdir():
        path.write_bytes(path.read_bytes()[:-10])
    assert plans() == 1 and plans() == 0
