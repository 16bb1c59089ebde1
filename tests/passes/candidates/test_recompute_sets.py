"""Recompute sets: less memory for more time."""

from __future__ import annotations

import itertools

from passes.candidates.recompute_sets import recompute_sets
from passes.pricing.predict import predict
from tests.passes.capture.test_captured_step import decided
from tests.passes.recompute.test_recompute_activations import AGAIN, PASSES, of_blocks


def test_sets_hold_less_and_take_longer_one_after_the_other():
    captured, ctx = of_blocks(4, rows=64)
    sets = recompute_sets(captured, ctx, 6)
    assert len(sets) > 3
    for one, after in itertools.pairwise(sets):
        assert one.held_bytes > after.held_bytes
        assert one.seconds < after.seconds
    plan = decided(ctx, AGAIN, bucket_bytes=0)
    changes = [{"recompute": one.recompute, "also_save": one.also_save} for one in sets]
    said = [
        predict(captured, plan.replace(**change), ctx, PASSES).prediction
        for change in [{}, changes[0], changes[-1]]
    ]
    assert said[0].recomputed_bytes == said[0].recomputed_seconds == 0
    peaks = [one.peak_bytes for one in said]
    assert peaks == sorted(peaks, reverse=True)
    assert said[-1].recomputed_seconds > said[1].recomputed_seconds > 0
    # As when people checkpoint each block: what begins a block is saved, and not what it makes.
    assert any(key.startswith("1:add") for key in sets[-1].also_save)
    assert said[-1].peak["activations"] < said[0].peak["activations"] / 2
