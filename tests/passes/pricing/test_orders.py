"""Orders: where there is little room, collectives start in the order that is the fastest."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn

from passes.graph.captured import Captured
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.pipeline import default_passes
from passes.pricing.orders import orders, with_fastest_order
from passes.pricing.predict import LoweredStep, predict
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.hardware import LinkRate
from passes.types.plan import Plan
from tests.passes.captures import capture_step
from tests.passes.graphs import hardware, plan_of

PASSES = default_passes()
WIDTHS = (64, 256, 32, 320, 64, 16, 256, 64)


@functools.cache
def captured() -> tuple[Captured, Context]:
    """Layers of many sizes, of which the network takes about as long as the compute."""
    layers = [nn.Linear(*sizes) for sizes in itertools.pairwise(WIDTHS)]
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    rates = dict.fromkeys(kinds, LinkRate(1e-6, 2e-8))
    model = nn.Sequential(*layers)
    return capture_step(model, torch.randn(64, WIDTHS[0]), hardware=hardware(collectives=rates))


def lowered(ctx: Context) -> tuple[Plan, LoweredStep]:
    """Everything gathered again, in the order that ``reorder`` finds."""
    step = captured()[0]
    plan = plan_of(ctx.parameters, Decision.SHARD_REGATHER, ctx.world_size)
    plan = plan.replace(bucket_bytes=bucket_bytes_for(ctx))
    plan = plan.replace(order=orders(predict(step, plan, ctx.replace(deciding=True), PASSES)))
    return plan, predict(step, plan, ctx, PASSES)


def test_under_a_limit_the_order_is_never_slower_and_somewhere_faster():
    step, ctx = captured()
    most = lowered(ctx)[1].prediction.peak_bytes
    least = lowered(ctx.replace(limit_bytes=1))[1].prediction.peak_bytes
    gains = []
    for index in range(12):
        limited = ctx.replace(limit_bytes=least + (most - least) * index // 11)
        plan, before = lowered(limited)
        found, after = with_fastest_order(plan, before, step, limited, PASSES)
        assert after.prediction.peak_bytes <= limited.limit_bytes
        assert found.replace(order=plan.order) == plan  # nothing else is changed
        for phase, order in plan.order.items():
            assert sorted(map(repr, found.order[phase])) == sorted(map(repr, order))
        # It is lowered as that says.
        assert predict(step, found, limited, PASSES).prediction == after.prediction
        gains.append(before.prediction.step_seconds / after.prediction.step_seconds)
    assert min(gains) >= 1.0
    assert max(gains) > 1.01


def test_without_a_limit_the_order_stays():
    step, ctx = captured()
    plan, before = lowered(ctx)
    found, after = with_fastest_order(plan, before, step, ctx, PASSES)
    assert found is plan and after is before
