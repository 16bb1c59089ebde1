"""Activations that move to weights that stay, trained: like one process that has all batches."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from osdp_compile import OsdpError
from passes.types.plan import Collective
from tests.chosen import more
from tests.end_to_end.moving import (
    GATED,
    MLP,
    Gated,
    Mlp,
    batch,
    mean_square,
    plan_for,
    recipe_of,
)
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    finish_step,
    plan_in_force,
    train_osdp,
)


def _train(rank, world_size, make, rest, recipe, keep_tokens=False, chunks=1):
    """Distance from one process's parameters; placements; the plan; whole weights gathered."""
    torch.manual_seed(0)
    model = make().double()
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    plan = plan_for(model, world_size, rest, keep_tokens, chunks)
    options = {"hardware": SLOW, "plan": plan, "debug": True}
    with mock.patch("osdp_compile.lowering.agreeing.log.warning") as warned:
        trained = train_osdp(model, options, recipe, rank)
    wanted = reference.train(rank)
    apart = trained.distance(wanted)
    norms = [a / b - 1 for a, b in zip(trained.norms, wanted.norms, strict=True)]
    placed = {name: str(p.placements[0]) for name, p in model.named_parameters()}
    differ = sum("batches differ" in call.args[0] for call in warned.call_args_list)
    return apart, max(map(abs, norms)), placed, plan_in_force(model), differ


@pytest.mark.parametrize("rest", ["shard_regather", *more("replicate")])
@pytest.mark.parametrize("keep_tokens", [False, True])
def test_an_mlp_that_stays_trains_like_one_process(two_ranks, rest, keep_tokens):
    found = two_ranks.run(_train, Mlp, rest, recipe_of(batch), keep_tokens)
    for apart, norm, placed, plan, warnings in found:
        assert apart < 1e-11 and norm < 1e-9 and not warnings
        assert placed["up.weight"] == placed["up.bias"] == "S(0)"
        assert placed["down.weight"] == "S(1)"
        purposes = [one for order in plan.order.values() for one in order]
        assert sum(one.tokens for one in purposes) == 5 - keep_tokens
        assert not {n for one in purposes if not one.tokens for n in one.names} & set(MLP)


@pytest.mark.thorough
def test_a_gated_mlp_on_four_ranks_with_accumulated_gradients(four_ranks):
    found = four_ranks.run(_train, Gated, "replicate", recipe_of(batch, backwards=2))
    for apart, norm, placed, plan, warnings in found:
        assert apart < 1e-11 and norm < 1e-9 and not warnings
        assert placed["gate.weight"] == "S(0)" and placed["down.weight"] == "S(1)"
        assert Collective(("down.weight#0",), gathers=False, tokens=True) in plan.order["forward"]


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_tokens_in_chunks_train_like_one_process(two_ranks, keep_tokens):
    results = two_ranks.run(_train, Mlp, "shard_regather", recipe_of(batch), keep_tokens, 2)
    for apart, norm, placed, plan, warnings in results:
        assert apart < 1e-11 and norm < 1e-9 and not warnings
        assert placed["up.weight"] == "S(0)" and placed["down.weight"] == "S(1)"
        purposes = [one for order in plan.order.values() for one in order if one.tokens]
        # The saved input is gathered whole, or its chunks are kept.
        assert len(purposes) == 2 * 2 + 2 * 2 + (not keep_tokens)


@pytest.mark.thorough
def test_a_gated_mlp_in_uneven_chunks_on_four_ranks(four_ranks):
    """Four tokens in three chunks; gradients are accumulated."""
    results = four_ranks.run(_train, Gated, "replicate", recipe_of(batch, backwards=2), True, 3)
    for apart, norm, _, plan, warnings in results:
        assert apart < 1e-11 and norm < 1e-9 and not warnings
        assert sum(one.tokens for one in plan.order["forward"]) == 6


@pytest.mark.thorough
def test_ranks_with_other_batches_and_chunks_train_like_one_process(two_ranks):
    results = two_ranks.run(_train, Mlp, "shard_regather", recipe_of(differing), False, 2)
    for apart, norm, *_ in results:
        assert apart < 1e-11 and norm < 1e-9
    assert results[0][-1] == 2


def differing(step: int, micro: int, rank: int) -> Tensor:
    """From the third step on, some ranks have other batches than others."""
    rows = {2: 4 + rank, 4: 4 - rank, 5: 1 + rank, 7: 6}.get(step, 4)
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(rows, 8, generator=generator, dtype=torch.float64)


@pytest.mark.thorough
@pytest.mark.parametrize("keep_tokens", [True, *more(False)])
def test_ranks_with_other_batches_train_like_one_process(two_ranks, keep_tokens):
    """Weights travel in steps whose batches differ: rank 0 has a second graph for them."""
    results = two_ranks.run(_train, Mlp, "shard_regather", recipe_of(differing), keep_tokens)
    for apart, norm, *_ in results:
        assert apart < 1e-11 and norm < 1e-9
    assert results[0][-1] == 2  # its graphs of four rows and of one have a second form


def _a_rank_cannot_compile(rank, world_size):
    """The error of every rank, where the graph that gathers all weights fails on one."""
    torch.manual_seed(0)
    model = Mlp().double()
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    compiled = torch.compile(model, backend="osdp", options=options, dynamic=False)
    compiled(batch(0, 0, rank)).sum().backward()
    with (
        mock.patch("osdp_compile.lowering.lower._lowered", side_effect=RuntimeError("no compiler"))
        if rank == 0
        else contextlib.nullcontext()
    ):
        compiled(batch(0, 0, rank)).sum().backward()  # equal batches need no other graph
        try:
            compiled(differing(2, 0, rank) if rank == 0 else batch(0, 0, 1)[:3])
        except OsdpError as error:
            return str(error)
    return "no error"


def test_the_error_of_a_rank_is_the_error_of_every_rank(two_ranks):
    first, second = two_ranks.run(_a_rank_cannot_compile)
    assert "the ranks' batches differ" in first and "no compiler" in first
    assert "rank 0: the ranks' batches differ" in second


def _deviations(rank, world_size, autocast):
    """Distances of osdp's and DDP's parameters from those of float64 training in one process."""
    torch.manual_seed(0)
    model = Gated()

    def step(called, given):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = called(given.float())
        return out.float().square().mean()

    recipe = Recipe(step=step, optimizer=adamw, steps=10, batch=batch)
    exact = dataclasses.replace(recipe, step=mean_square)
    reference = Reference(copy.deepcopy(model).double(), exact, world_size).train(rank)
    parallel = copy.deepcopy(model)
    wrapped, optimizer = DistributedDataParallel(parallel), adamw(parallel.parameters())
    for number in range(recipe.steps):
        step(wrapped, batch(number, 0, rank)).backward()
        finish_step(parallel, optimizer, None, recipe)
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    ours = train_osdp(model, options, recipe, rank).parameters

    def distance(parameters):
        return sum(
            (one.double() - reference.parameters[name]).square().sum().item()
            for name, one in parameters.items()
        )

    return distance(ours), distance({n: p.detach() for n, p in parallel.named_parameters()})


@pytest.mark.thorough
@pytest.mark.parametrize("autocast", [False, True])
def test_no_further_from_one_process_than_twice_ddp(two_ranks, autocast):
    for ours, theirs in two_ranks.run(_deviations, autocast):
        assert 0 < ours <= 4 * theirs  # squares


def _planned(rank, world_size, rows):
    """What the planner lets stay with the option, and the distance from one process."""
    torch.manual_seed(0)
    model = Gated().double()

    def some(step, micro, rank):
        return batch(step, micro, rank).repeat(rows // 4, 1)

    recipe = Recipe(step=mean_square, optimizer=adamw, steps=3, batch=some)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = ours.distance(wanted)
    return plan_in_force(model).moved, apart


@pytest.mark.parametrize("rows, moved", [(4, set(GATED)), *more((1024, set()))])
def test_the_planner_moves_the_smaller_thing(two_ranks, rows, moved):
    for found, apart in two_ranks.run(_planned, rows):
        assert found == moved
        assert apart < 1e-11


class Checkpointed(Gated):
    """The same in a region of torch.utils.checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_activation_checkpointing(two_ranks):
    for apart, norm, *_ in two_ranks.run(_train, Checkpointed, "shard_keep", recipe_of(batch)):
        assert apart < 1e-11 and norm < 1e-9
