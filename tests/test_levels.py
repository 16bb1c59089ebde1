"""Training on two hosts of two ranks: leg by leg or flat, it equals training in one process."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from osdp_compile import Decision, plan_of
from osdp_compile.session import session_for
from passes.hardware import Hardware, LinkRate
from tests.test_stress import many_small_layers
from tests.training import SLOW, mixed_plan, placements, whole

#: Weights travel alone, biases together.
BUCKET_BYTES = 600
#: The step at which rank 1's batch is smaller: it compiles anew, and follows the others' order.
SMALLER = 2


def two_levels(rate: LinkRate) -> Hardware:
    """A profile with this rate along both dimensions of the mesh."""
    kinds = dict.fromkeys(SLOW.collectives, rate)
    return dataclasses.replace(SLOW, dimensions={"host": kinds, "gpu": kinds})


#: Leg by leg is faster whatever the size; and slower.
QUICK, TARDY = two_levels(LinkRate(1e-9, 1e-11)), two_levels(LinkRate(1.0, 1e-6))


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 2 if (step, rank) == (SMALLER, 1) else 5
    return torch.randn(rows, 8, dtype=torch.float64, generator=generator)


def train(rank, world_size, hardware, steps):
    """How far all is from one process; the plan's later legs by graph; the groups in the graphs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
    model = many_small_layers((13, 6, 9))
    alone = copy.deepcopy(model)
    plan = mixed_plan(model, list(Decision), bucket_bytes=BUCKET_BYTES, world_size=world_size)
    with tempfile.TemporaryDirectory() as folder:
        options = {"plan": plan, "hardware": hardware, "mesh": mesh, "debug": folder}
        compiled = torch.compile(model, backend="osdp", options=options)
        optimizers = [torch.optim.AdamW(m.parameters(), eps=1e-5) for m in (model, alone)]
        apart = 0.0
        for step in range(steps):
            losses = [alone(batch(step, other)).square().mean() for other in range(world_size)]
            loss = compiled(batch(step, rank)).square().mean()
            apart = max(apart, (loss - losses[rank]).abs().item())
            loss.backward()
            (sum(losses) / world_size).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if steps > SMALLER:
            with torch.no_grad():
                apart = max(apart, (compiled(batch(0, 0)) - alone(batch(0, 0))).abs().max().item())
        texts = [path.read_text() for path in sorted(Path(folder).glob("*-reorder.txt"))]
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max(apart, *((whole(p) - q).abs().max().item() for p, q in pairs))
    order = plan_of(model).order
    later = {graph: sum(one.leg > 0 for one in all_of) for graph, all_of in order.items()}
    between = [text.count("<host group>") for text in texts]
    return apart, later, between, placements(model)


@pytest.mark.timeout(600)
def test_leg_by_leg_equals_one_process(four_ranks):
    results = four_ranks.run(train, QUICK, SMALLER + 2)
    for apart, later, _, placed in results:
        assert apart < 1e-12
        assert min(later.values()) > 0 and later == results[0][1]
        assert set(placed.values()) == {"shard", "replicate"}
    texts = results[0][2]  # rank 0 writes them: forward, backward, and the forward alone
    assert len(texts) == 3 and min(texts) > 0


def test_flat_where_that_is_faster(four_ranks):
    for apart, later, between, _ in four_ranks.run(train, TARDY, SMALLER):
        assert apart < 1e-12
        assert set(later.values()) == {0}
        assert set(between) <= {0}


def on_what_is_measured(rank, world_size, hardware):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
    model = nn.Linear(64, 64)
    options = {"mesh": mesh, "hardware": hardware}
    torch.compile(model, backend="osdp", options=options)(torch.randn(2, 64)).sum().backward()
    context = session_for(model).context
    return context.levels, sorted(context.hardware.dimensions), context.world_size


def test_the_first_call_measures_along_both_dimensions(four_ranks):
    for levels, dimensions, world_size in four_ranks.run(on_what_is_measured, None):
        assert [(level.name, level.size) for level in levels] == [("host", 2), ("gpu", 2)]
        assert dimensions == ["gpu", "host"] and world_size == 4


def test_a_profile_without_the_dimensions_means_flat_collectives(four_ranks):
    for levels, _, world_size in four_ranks.run(on_what_is_measured, SLOW):
        assert levels is None and world_size == 4
