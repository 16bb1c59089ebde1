"""The helper that starts ranks: results, failures, hangs, deaths."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, Ranks


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
