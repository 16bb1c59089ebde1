"""Choices: the possible decisions of a parameter, from the most memory to the least."""

from __future__ import annotations

from passes.candidates.choices import choices_of
from passes.types.decision import Decision
from tests.passes.graphs import context, parameter


def test_a_large_parameter_has_three_choices_and_a_small_one_only_replication():
    ctx = context([parameter("w", (128, 64))])
    found = choices_of(parameter("w", (128, 64)), ctx)
    assert [one.decision for one in found] == [
        Decision.REPLICATE,
        Decision.SHARD_KEEP,
        Decision.SHARD_REGATHER,
    ]
    again, kept = found[2], found[1]
    assert again.backward_seconds > kept.backward_seconds
    assert again.memory_bytes < kept.memory_bytes
    assert [one.decision for one in choices_of(parameter("b", (1,)), ctx)] == [Decision.REPLICATE]


def test_what_is_not_trained_sends_no_gradient():
    ctx = context([parameter("w", (128, 64))])
    trained = choices_of(parameter("w", (128, 64)), ctx)
    frozen = choices_of(parameter("w", (128, 64), requires_grad=False), ctx)
    assert all(one.backward_seconds > 0 for one in trained)
    assert frozen[0].backward_seconds == frozen[1].backward_seconds == 0.0
