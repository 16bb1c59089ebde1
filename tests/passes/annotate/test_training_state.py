"""Training state: bytes of parameters, gradients and optimizer state; the optimizer's step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from passes.annotate.training_state import (
    EARLIER_GRADIENTS,
    LIBRARIES,
    OTHER_MODELS,
    StepBytes,
    base_kinds,
    gradient_bytes,
    held_between_steps,
    more_earlier_gradients,
    optimizer_seconds,
    optimizer_temporary_bytes,
    state_bytes,
)
from passes.types.context import StepTensors
from passes.types.decision import Decision
from passes.types.learned import Learned
from tests.passes.graphs import context, hardware, parameter

#: Ten rows on four ranks: rank 0 has three.
UNEVEN = parameter("uneven", (10, 2))
FROZEN = parameter("frozen", (8, 2), requires_grad=False)
DECISIONS = {"uneven": Decision.SHARD_KEEP, "frozen": Decision.REPLICATE}


def mixed(**changes):
    return context([UNEVEN, FROZEN], DECISIONS, world_size=4, **changes)


def test_the_bytes_are_those_of_the_rank_with_the_largest_shards():
    ctx = mixed()
    assert state_bytes(ctx, ctx.plan) == {
        "parameters": 3 * 2 * 4 + 8 * 2 * 4,
        "gradients": 3 * 2 * 4,  # a frozen parameter has none, and no optimizer state
        "optimizer": 2 * 3 * 2 * 4,
    }


def test_gradients_are_held_between_steps_only_if_later_backwards_add_to_them():
    ctx = mixed()
    assert held_between_steps(ctx, ctx.plan) == {"parameters": 88, "optimizer": 48}
    adding = mixed(adds_gradients=True)
    assert held_between_steps(adding, adding.plan)[EARLIER_GRADIENTS] == 24


def test_a_gradient_that_is_a_view_keeps_its_bucket():
    ctx = mixed()
    assert gradient_bytes(ctx, ctx.plan, kept_bytes=10) == 24
    assert gradient_bytes(ctx, ctx.plan, kept_bytes=100) == 100
    assert more_earlier_gradients(ctx, ctx.plan, 100) == {}
    adding = mixed(adds_gradients=True)
    assert more_earlier_gradients(adding, adding.plan, 100) == {EARLIER_GRADIENTS: 76}


def test_an_optimizers_step_makes_two_tensors_of_a_shard_and_holds_one_of_the_shard_before():
    first, second = parameter("first", (6, 2)), parameter("second", (5, 2))
    decisions = {"first": Decision.REPLICATE, "second": Decision.REPLICATE}
    for both, most in (([first, second], 2 * 40 + 48), ([second, first], 2 * 48 + 40)):
        ctx = context([both[0], FROZEN, both[1]], {**decisions, "frozen": Decision.REPLICATE})
        assert optimizer_temporary_bytes(ctx, ctx.plan) == most
    ctx = mixed()
    assert optimizer_temporary_bytes(ctx, ctx.plan) == 2 * 24
    untrained = context([FROZEN], DECISIONS, world_size=4)
    assert optimizer_temporary_bytes(untrained, untrained.plan) == 0


def test_on_a_gpu_the_step_takes_all_parameters_together():
    ctx = mixed(hardware=hardware(device_type="cuda"))
    assert optimizer_temporary_bytes(ctx, ctx.plan) == 24  # one of three rows, not of the frozen
    given = [replace(UNEVEN, name=name, step_tensors=StepTensors(3, 2, True)) for name in "abc"]
    given[1] = replace(given[1], step_tensors=StepTensors(4, 9, False))
    for device in ("cpu", "cuda"):  # what the optimizer says counts, not the device
        ctx = context(
            given, Decision.SHARD_KEEP, world_size=4, hardware=hardware(device_type=device)
        )
        assert StepBytes(ctx).most(np.array([10, 10, 10])) == 2 * (10 + 10)
        assert StepBytes(ctx).most(np.array([10, 20, 10])) == 3 * 20 + 10
        assert optimizer_temporary_bytes(ctx, ctx.plan) == 4 * 24
    none = replace(UNEVEN, step_tensors=StepTensors(0, 0, False))
    ctx = context([none], Decision.SHARD_KEEP, world_size=4)
    assert optimizer_temporary_bytes(ctx, ctx.plan) == 0


def test_a_plan_that_shards_nothing_steps_on_plain_tensors():
    profile = hardware(
        update_seconds_per_byte=1e-9,
        update_seconds_per_parameter=1e-3,
        update_seconds_per_plain_parameter=1e-6,
    )
    ctx = mixed(hardware=profile)
    assert optimizer_seconds(ctx, ctx.plan) == pytest.approx(160e-9 + 1e-3)
    whole = context([UNEVEN, FROZEN], Decision.REPLICATE, world_size=4, hardware=profile)
    held_bytes = 10 * 2 * 4 * 4 + 8 * 2 * 4  # parameter, gradient and Adam's two moments
    assert optimizer_seconds(whole, whole.plan) == pytest.approx(held_bytes * 1e-9 + 1e-6)


def test_the_learned_time_of_the_training_loop_is_added_to_it():
    profile = hardware(update_seconds_per_byte=1e-9)
    learned = Learned(8, update_factor=2.0, loop_seconds=0.5)
    before, after = (mixed(hardware=one) for one in (profile, replace(profile, in_force=learned)))
    seconds = optimizer_seconds(before, before.plan)
    assert optimizer_seconds(after, after.plan) == pytest.approx(2 * seconds + 0.5)


def test_the_base_is_told_by_kind():
    ctx = mixed(base_bytes=100, accumulated_bytes=30, other_models_bytes=20)
    assert base_kinds(ctx) == {"inputs": 50, "accumulated": 30, OTHER_MODELS: 20, LIBRARIES: 0}
    hardware = replace(ctx.hardware, library_bytes=8)
    kinds = base_kinds(ctx.replace(hardware=hardware))
    assert (kinds["inputs"], kinds[LIBRARIES]) == (42, 8)
