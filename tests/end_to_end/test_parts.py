"""Parts of a model: blocks that are compiled one by one have one plan, and share compiled code."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import osdp_compile
from osdp_compile.tracking.session import session_for
from tests.chosen import more, thorough
from tests.training import (
    SLOW,
    Recipe,
    finish_step,
    mean_over_ranks,
    placements,
    plan_options,
    sgd,
    whole,
)


class Blocks(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def some_ids(step, rank, rows=4):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 32, (rows,), generator=generator)


def compiled_by_blocks(model, options):
    for block in model.blocks:
        block.compile(backend="osdp", options=options)


def frames_of(model):
    """The number of compiled frames, and how often a step runs each of them."""
    observed = session_for(model).observed
    in_step = observed.in_step
    return len({*in_step}), [in_step.count(frame) for frame in dict.fromkeys(in_step)]


def train_by_blocks(rank, world_size, plan, accumulates, before=False, blocks=3):
    """The differences to one process that has all ranks' batches; plan and compiled frames.

    ``before``: the model is sharded before its first call.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks(blocks)
    reference = copy.deepcopy(model)
    options = plan_options(model, plan, Recipe(), world_size)
    if before:
        osdp_compile.shard(model, options.pop("plan"))
    compiled_by_blocks(model, options)
    optimizer, other = sgd(model.parameters()), sgd(reference.parameters())
    recipe = Recipe(max_norm=0.05)
    differences = []
    for step in range(3):
        for micro in range(2 if accumulates else 1):
            inside = accumulates and micro == 0
            with osdp_compile.no_sync(model) if inside else contextlib.nullcontext():
                loss = model(some_ids(2 * step + micro, rank)).square().mean()
                loss.backward()
            total = 0.0
            for one in range(world_size):
                ids = some_ids(2 * step + micro, one)
                part = reference(ids).square().mean() / world_size
                part.backward()
                total += part.item()
            differences.append(mean_over_ranks(loss) - total)
        norms = finish_step(model, optimizer, None, recipe)
        wanted = finish_step(reference, other, None, recipe)
        differences.append(norms[0] - wanted[0])
    differences += [
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    names = [row.name for row in osdp_compile.plan_of(model).parameters]
    return max(map(abs, differences)), placements(model), names, frames_of(model)


@pytest.mark.parametrize(
    ("plan", "accumulates", "frames"),
    [
        ("shard_regather", False, (1, [3])),
        *thorough(("replicate", False, (1, [3]))),
        *thorough(("shard_keep", True, (1, [3]))),
        *thorough(({"blocks.1.up.weight": "shard_keep"}, True, (2, [1, 2]))),
    ],
)
def test_blocks_that_are_compiled_one_by_one(two_ranks, plan, accumulates, frames):
    """Blocks that the plan treats alike are compiled once."""
    for difference, placed, names, found in two_ranks.run(train_by_blocks, plan, accumulates):
        assert difference < 1e-5
        assert names == list(placed) == list(dict(Blocks().named_parameters()))
        if plan == "shard_regather":
            assert set(placed.values()) == {"shard"}
        assert (found[0], sorted(found[1])) == frames


@pytest.mark.parametrize(
    ("plan", "accumulates", "blocks", "frames"),
    [
        ("shard_regather", False, 10, (1, [10])),
        *thorough(("replicate", True, 3, (1, [3]))),
        *thorough(({"blocks.1.up.weight": "shard_keep"}, True, 3, (2, [1, 2]))),
    ],
)
def test_blocks_of_a_model_that_was_sharded_before(two_ranks, plan, accumulates, blocks, frames):
    """More blocks than Dynamo compiles code for one function."""
    found = two_ranks.run(train_by_blocks, plan, accumulates, before=True, blocks=blocks)
    for difference, _, names, of_step in found:
        assert difference < 1e-5
        assert names == list(dict(Blocks(blocks).named_parameters()))
        assert (of_step[0], sorted(of_step[1])) == frames


def whole_after_blocks(rank, world_size):
    """The errors of compiling the whole model after its blocks."""
    torch._dynamo.reset()
    model = Blocks()
    compiled_by_blocks(model, plan_options(model, "shard_regather", Recipe(), world_size))
    model(some_ids(0, rank)).sum().backward()
    for block in model.blocks:
        block._compiled_call_impl = None
    with pytest.raises(osdp_compile.OsdpError) as refused:
        torch.compile(model, backend="osdp")(some_ids(0, rank))
    return str(refused.value)


def test_the_whole_model_is_not_compiled_after_its_blocks(two_ranks):
    for said in two_ranks.run(whole_after_blocks):
        assert "'blocks.0.up.weight' and 'blocks.1.up.weight' are in one graph" in said


def peak_by_blocks(rank, world_size, share):
    """Several steps at so many times the least limit: its bytes, and those that were measured."""
    torch._dynamo.reset()

    def step(options):
        torch.manual_seed(0)
        model = Blocks(blocks=4, width=128)
        compiled_by_blocks(model, {"hardware": SLOW, **options})
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(3):
            model(some_ids(number, rank, rows=256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return osdp_compile.plan_of(model), frames_of(model)

    with pytest.raises(osdp_compile.InfeasibleLimit) as infeasible:
        step({"memory_limit": 1 << 20})
    limit_bytes = round(share * infeasible.value.least_bytes)
    del infeasible  # it keeps the model that did not fit, which would count beside the next
    torch._dynamo.reset()
    with osdp_compile.PeakMemory() as memory:
        plan, frames = step({"memory_limit": limit_bytes})
    torch._dynamo.reset()
    return memory.peak_bytes, plan.prediction.peak_bytes, limit_bytes, frames


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.parametrize("share", [1.05, *more(1.3)])
def test_blocks_keep_a_limit(two_ranks, share):
    for peak_bytes, predicted_bytes, limit_bytes, _ in two_ranks.run(peak_by_blocks, share):
        assert predicted_bytes <= limit_bytes
        assert peak_bytes <= limit_bytes, (peak_bytes, predicted_bytes)
        assert peak_bytes >= 0.8 * predicted_bytes
