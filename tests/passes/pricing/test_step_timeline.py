"""Step timeline: it adds up to the prediction, also for a step without its inner layers."""

from __future__ import annotations

import itertools

import pytest

from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.pricing.predict import predict
from passes.pricing.step_timeline import step_timeline
from passes.simulate.timeline import COMPUTE, Timeline
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.passes.capture.test_fold_layers import NETWORKS, PASSES, captured, folded, network


def alive_bytes(phase: Timeline) -> list[int]:
    """The base and all buffers, at each place."""
    total = [phase.base_bytes] * len(phase.places_seconds)
    for life in phase.lives:
        for place in range(life.first, life.last + 1):
            total[place] += life.buffer.size_bytes
    return total


@pytest.mark.parametrize("speed", NETWORKS)
@pytest.mark.parametrize("folds", [False, True])
def test_it_adds_up_to_the_prediction(folds, speed):
    step, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS[speed]), deciding=True)
    plan = Plan.uniform(
        [(one.name, one) for one in ctx.parameters],
        Decision.SHARD_REGATHER,
        world_size=ctx.world_size,
        bucket_bytes=bucket_bytes_for(ctx),
    )
    given = folded() if folds else step
    lowered = predict(given, plan, ctx, PASSES)
    found, said = step_timeline(lowered, plan, ctx, given if folds else None), lowered.prediction
    assert found.step_seconds == pytest.approx(said.step_seconds)
    assert found.compute_seconds == pytest.approx(said.compute_seconds)
    assert found.exposed_seconds == pytest.approx(said.exposed_seconds)
    assert found.peak.peak_bytes == said.peak_bytes
    for phase in found.phases[:2]:
        assert max(alive_bytes(phase)) == phase.peak_bytes
        assert list(phase.places_seconds) == sorted(phase.places_seconds)
        computing = [one for one in phase.events if one.stream == COMPUTE]
        spans = sorted([*computing, *phase.stalls], key=lambda one: one.start_seconds)
        late = [b.start_seconds - a.end_seconds for a, b in itertools.pairwise(spans)]
        assert min(late) >= -1e-12 * found.step_seconds, "the compute stream does one thing at once"


def test_layers_that_the_step_lacks_have_their_time_and_the_cause_of_their_waits():
    ctx = captured()[1].replace(hardware=network(NETWORKS["slow"]), deciding=True)
    named = [(one.name, one) for one in ctx.parameters]
    plan = Plan.uniform(named, Decision.SHARD_REGATHER, world_size=ctx.world_size)
    found = step_timeline(predict(folded(), plan, ctx, PASSES), plan, ctx, folded())
    for phase in found.phases[:2]:
        gap = phase.left_out
        assert gap.layers == len(folded().inner) and f"{gap.layers} alike" in gap.label
        own = [one for one in phase.events if one.name == gap.name]
        waits = [one for one in phase.stalls if one.waits_for == gap.name]
        assert own[0].start_seconds == gap.start_seconds
        assert own[0].end_seconds == waits[0].start_seconds
        assert waits[0].end_seconds == gap.end_seconds
        assert gap.reason.startswith("no compute to hide behind")
    assert found.phases[2].left_out is None
