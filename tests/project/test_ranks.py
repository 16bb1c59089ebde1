"""The helper that starts ranks: results, failures, hangs, deaths."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, Ranks
from tests.training import Recipe, placements, plan_options, train_osdp


def add_over_ranks(rank, world_size, value):
    total = torch.tensor([float(value * (rank + 1))])
    dist.all_reduce(total)
    return rank, world_size, total.item(), os.getpid()


def fail_on_rank_one(rank, world_size):
    if rank == 1:
        raise ValueError("a wrong turn")
    dist.barrier()


def hang_on_rank_zero(rank, world_size):
    if rank == 0:
        time.sleep(600)


def die_on_rank_zero(rank, world_size):
    if rank == 0:
        os._exit(3)


def test_ranks_stay_alive_and_a_failing_function_does_not_harm_the_next(two_ranks):
    first = two_ranks.run(add_over_ranks, 10)
    assert [result[:3] for result in first] == [(0, 2, 30.0), (1, 2, 30.0)]
    assert two_ranks.run(add_over_ranks, 1)[0][3] == first[0][3]

    with pytest.raises(RankFailed, match=r"rank 1: [\s\S]*a wrong turn"):
        two_ranks.run(fail_on_rank_one)
    with pytest.raises(RankFailed, match=r"no answer after 3 s[\s\S]*hang_on_rank_zero"):
        two_ranks.run(hang_on_rank_zero, timeout_seconds=3)
    with pytest.raises(RankFailed, match=r"rank 0: the process died"):
        two_ranks.run(die_on_rank_zero)

    again = two_ranks.run(add_over_ranks, 10)
    assert [result[2] for result in again] == [30.0, 30.0]
    assert again[0][3] != first[0][3]


def test_a_function_that_cannot_be_found_by_its_path_is_refused():
    with Ranks(1) as ranks, pytest.raises(AttributeError, match="local"):
        ranks.run(lambda rank, world_size: None)


def trained_without_inductor(rank, world_size):
    """Losses before and after a step, and a function that reads no parameter."""
    error = AssertionError("Inductor compiles")
    with mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", side_effect=error):
        model = torch.nn.Linear(4, 2)
        options = plan_options(model, "shard_regather", Recipe(), world_size)
        trained = train_osdp(model, options, Recipe(batch=four_numbers, steps=2), rank)
        doubled = torch.compile(lambda x: x * 2, backend="osdp")(torch.ones(2))
    return trained.losses, placements(model), doubled.tolist()


def four_numbers(step, micro, rank):
    return torch.ones(3, 4)


def test_boxed_graphs_need_no_inductor(two_ranks):
    with mock.patch.object(Ranks, "boxed", True):
        for losses, placed, doubled in two_ranks.run(trained_without_inductor):
            assert losses[1] < losses[0]
            assert set(placed.values()) == {"shard"}
            assert doubled == [2.0, 2.0]
    with mock.patch.object(Ranks, "boxed", False), pytest.raises(RankFailed, match="Inductor"):
        two_ranks.run(trained_without_inductor)
