"""Two hosts of two ranks train as one process: stage by stage, within hosts, or flat."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from osdp_compile import plan_of, shard
from osdp_compile.tracking.session import session_for
from passes.types.decision import DECISIONS, FLAT_DECISIONS
from passes.types.hardware import Hardware, LinkRate
from tests.end_to_end.test_stress import many_small_layers
from tests.training import SLOW, mixed_plan, placements, whole

#: Weights travel alone, biases together.
BUCKET_BYTES = 600
#: The step at which rank 1's batch is smaller: it compiles anew, and follows the others' order.
SMALLER = 2
#: Gradients are clipped to this.
NORM = 0.01


def two_dimensions(rate: LinkRate) -> Hardware:
    """A profile with this rate along both dimensions of the mesh."""
    kinds = dict.fromkeys(SLOW.collectives, rate)
    return dataclasses.replace(SLOW, dimensions={"host": kinds, "gpu": kinds})


#: Stage by stage is faster whatever the size; and slower.
QUICK, TARDY = two_dimensions(LinkRate(1e-9, 1e-11)), two_dimensions(LinkRate(1.0, 1e-6))


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * (step + 1) + rank)
    rows = 2 if (step, rank) == (SMALLER, 1) else 5
    return torch.randn(rows, 8, dtype=torch.float64, generator=generator)


@dataclasses.dataclass
class Found:
    """What training on a rank leaves.

    ``apart``: how far all is from one process. ``later``: the plan's later stages by graph.
    ``texts``: of the graphs, on the rank that writes them.
    """

    apart: float
    later: dict[str, int]
    texts: list[str]
    placed: dict[str, str]


def train(rank, world_size, hardware, decisions, steps, from_meta=False):
    """``from_meta``: the model is laid out before it has memory."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
    alone = many_small_layers((13, 6, 9))
    with torch.device("meta" if from_meta else "cpu"):
        model = many_small_layers((13, 6, 9)) if from_meta else copy.deepcopy(alone)
    plan = mixed_plan(model, decisions, bucket_bytes=BUCKET_BYTES, world_size=world_size)
    plan = plan.replace(ranks_of_a_host=2)
    with tempfile.TemporaryDirectory() as folder:
        options = {"hardware": hardware, "debug": folder}
        if from_meta:
            shard(model, plan, mesh=mesh)
            model.to_empty(device="cpu").load_state_dict(alone.state_dict())
            _spoil_copies(model, rank)
        else:
            options |= {"plan": plan, "mesh": mesh}
        optimizers = [torch.optim.AdamW(m.parameters(), eps=1e-5) for m in (model, alone)]
        for one, optimizer in zip((model, alone), optimizers, strict=True):
            if from_meta:
                break
            one(batch(-1, 0)).square().mean().backward()  # state, to be laid out at the first call
            optimizer.step()
            optimizer.zero_grad()
        compiled = torch.compile(model, backend="osdp", options=options)
        apart = 0.0
        for step in range(steps):
            losses = [alone(batch(step, other)).square().mean() for other in range(world_size)]
            loss = compiled(batch(step, rank)).square().mean()
            apart = max(apart, (loss - losses[rank]).abs().item())
            loss.backward()
            (sum(losses) / world_size).backward()
            norms = [clip_grad_norm_(m.parameters(), NORM) for m in (model, alone)]
            assert norms[1] > NORM, "nothing was clipped"
            apart = max(apart, (whole(norms[0]) - norms[1]).abs().item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if steps > SMALLER:  # compiled and eager, without gradients and with them
            with torch.no_grad():
                outputs = [one(batch(0, 0)) for one in (compiled, model, alone)]
            apart = max(apart, *((one - outputs[-1]).abs().max().item() for one in outputs))
            model(batch(0, rank)).sum().backward()
            every = torch.cat([batch(0, other) for other in range(world_size)])
            (alone(every).sum() / world_size).backward()
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            apart = max(apart, *((whole(p.grad) - q.grad).abs().max().item() for p, q in pairs))
        texts = [path.read_text() for path in sorted(Path(folder).glob("*-reorder.txt"))]
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max(apart, *((whole(p) - q).abs().max().item() for p, q in pairs))
    order = plan_of(model).order
    later = {graph: sum(one.stage > 0 for one in all_of) for graph, all_of in order.items()}
    return Found(apart, later, texts, placements(model))


def _spoil_copies(model: nn.Module, rank: int) -> None:
    """Other values where other ranks have the same: the first that has them is right."""
    for parameter in model.parameters():
        coordinate = parameter.device_mesh.get_coordinate()
        if any(
            placement.is_replicate() and place
            for placement, place in zip(parameter.placements, coordinate, strict=True)
        ):
            parameter.to_local().detach().add_(1.0)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_stage_by_stage_and_within_hosts_equals_one_process(four_ranks):
    results = four_ranks.run(train, QUICK, list(DECISIONS), SMALLER + 2)
    for found in results:
        assert found.apart < 1e-12
        assert min(found.later.values()) > 0 and found.later == results[0].later
        assert set(found.placed.values()) == {"shard", "replicate", "shard within host"}
    texts = results[0].texts  # forward, backward, and the forward alone
    assert len(texts) == 3 and all("<host group>" in text for text in texts)


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.timeout(600)
def test_a_model_laid_out_within_hosts_before_it_has_memory(four_ranks):
    for found in four_ranks.run(train, QUICK, list(DECISIONS), 2, from_meta=True):
        assert found.apart < 1e-12
        assert set(found.placed.values()) == {"shard", "replicate", "shard within host"}


@pytest.mark.thorough
def test_flat_where_that_is_faster(four_ranks):
    for found in four_ranks.run(train, TARDY, FLAT_DECISIONS, SMALLER):
        assert found.apart < 1e-12
        assert set(found.later.values()) == {0}
        assert not any("<host group>" in text for text in found.texts)


def on_what_is_measured(rank, world_size, hardware):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
    model = nn.Linear(64, 64)
    options = {"mesh": mesh, "hardware": hardware}
    torch.compile(model, backend="osdp", options=options)(torch.randn(2, 64)).sum().backward()
    context = session_for(model).context
    return context.mesh_dims, sorted(context.hardware.dimensions), context.world_size


@pytest.mark.thorough
def test_the_first_call_measures_along_both_dimensions(four_ranks):
    for mesh_dims, dimensions, world_size in four_ranks.run(on_what_is_measured, None):
        assert [(dim.name, dim.size) for dim in mesh_dims] == [("host", 2), ("gpu", 2)]
        assert dimensions == ["gpu", "host"] and world_size == 4


def test_a_profile_without_the_dimensions_means_flat_collectives(four_ranks):
    for mesh_dims, _, world_size in four_ranks.run(on_what_is_measured, SLOW):
        assert mesh_dims is None and world_size == 4
