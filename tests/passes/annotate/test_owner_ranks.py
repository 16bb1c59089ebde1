"""Owner ranks: who orthogonalizes which matrix, and what it takes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from passes.annotate.owner_ranks import (
    ROUND_BYTES,
    orthogonal_bytes,
    orthogonal_flops,
    orthogonal_seconds,
    owners,
    replicas_have_owners,
)
from passes.annotate.training_state import optimizer_seconds, optimizer_temporary_bytes
from passes.types.decision import Decision
from passes.types.hardware import LinkRate
from tests.passes.graphs import context, hardware, parameter

#: FLOPs of one matrix, and bytes of its update.
FLOPS, BYTES = 5 * (4 * 8 * 8 * 16 + 2 * 8**3), 8 * 16 * 2


def muon(name, shape=(16, 8)):
    return replace(parameter(name, shape), orthogonalized=True)


def step(decision, count=4, world_size=4, **changes):
    matrices = [muon(f"w{index}") for index in range(count)]
    return context(matrices, decision, world_size=world_size, **changes)


def test_flops_are_those_of_three_products_an_iteration_on_the_shorter_side():
    assert orthogonal_flops((16, 8)) == orthogonal_flops((8, 16)) == FLOPS


def test_alike_matrices_go_round_the_ranks():
    assert owners([5] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_busiest_rank_has_at_most_four_thirds_of_the_least_possible(seed):
    draw = random.Random(seed)
    flops = [draw.randint(1, 100) for _ in range(7)]
    work = [0, 0, 0]
    for one, rank in zip(flops, owners(flops, 3), strict=True):
        work[rank] += one

    def busiest(assigned):
        return max(sum(f for f, r in zip(flops, assigned, strict=True) if r == k) for k in range(3))

    best = min(busiest(assigned) for assigned in product(range(3), repeat=7))
    assert max(work) <= 4 / 3 * best


def test_sharded_matrices_are_gathered_and_sent_back_by_parts():
    ctx = step(Decision.SHARD_REGATHER)
    shards_bytes = 4 * BYTES / 4
    each = 1e-6 + shards_bytes * 3 / 4 * 1e-8
    assert orthogonal_seconds(ctx, ctx.plan) == pytest.approx(FLOPS / 1e9 + 2 * each)


def test_replicas_are_computed_by_one_rank_if_sending_them_is_faster():
    ctx = step(Decision.REPLICATE)
    assert replicas_have_owners((16, 8), ctx.hardware, 4)
    back = 1e-6 + 4 * BYTES * 3 / 4 * 1e-8
    assert orthogonal_seconds(ctx, ctx.plan) == pytest.approx(FLOPS / 1e9 + back)

    slow = hardware(collectives=dict.fromkeys(ctx.hardware.collectives, LinkRate(1e-3, 1e-8)))
    ctx = step(Decision.REPLICATE, hardware=slow)
    assert not replicas_have_owners((16, 8), slow, 4)
    assert orthogonal_seconds(ctx, ctx.plan) == pytest.approx(4 * FLOPS / 1e9)


def test_one_rank_computes_all():
    ctx = step(Decision.REPLICATE, world_size=1)
    assert orthogonal_seconds(ctx, ctx.plan) == pytest.approx(4 * FLOPS / 1e9)


def test_the_optimizers_step_has_its_time_and_memory():
    ctx = step(Decision.SHARD_REGATHER)
    plain = ctx.replace(parameters=tuple(replace(p, orthogonalized=False) for p in ctx.parameters))
    more = optimizer_seconds(ctx, ctx.plan) - optimizer_seconds(plain, plain.plan)
    assert more == pytest.approx(orthogonal_seconds(ctx, ctx.plan))
    assert orthogonal_seconds(plain, plain.plan) == 0
    more = optimizer_temporary_bytes(ctx, ctx.plan) - optimizer_temporary_bytes(plain, plain.plan)
    assert more == orthogonal_bytes(ctx.parameters, 4) == 6 * BYTES + 3 * BYTES


def test_rounds_bound_the_memory_of_many_matrices():
    many = [muon(f"w{index}", (1024, 1024)) for index in range(400)]
    assert orthogonal_bytes(many, 4) == 6 * ROUND_BYTES + 3 * (2 << 20)
    assert orthogonal_bytes([parameter("w", (4, 4))], 4) == 0
