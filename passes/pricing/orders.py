"""Orders: search for a better start order of a plan's collectives when memory is short.

``reorder`` finds its order with a greedy walk: it starts the best collective that fits now. If the
memory limit holds back a collective, this order is not always the best: a gather that takes the
last headroom delays the gradient or the larger gather after it. An order found with fewer
collectives in flight, and then followed with all the headroom, may be faster. Both orders are
lowered and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.graph.captured import Captured
from passes.graph.metadata import HELD_BACK
from passes.overlap.reorder_collectives import order_of
from passes.pipeline import Pass
from passes.pricing.predict import LoweredStep, predict
from passes.types.annotations import Reason
from passes.types.context import Context, Phase
from passes.types.plan import Collective, Plan

#: In-flight limits that give other orders: nothing in flight, and one collective at a time.
_IN_FLIGHT_BYTES = (0, 1)


def orders(step: LoweredStep) -> dict[str, tuple[Collective, ...]]:
    """By phase, the start order of the collectives of a lowered step."""
    return {
        phase.value: order_of(gm.graph)
        for phase, gm in ((Phase.FORWARD, step.forward), (Phase.BACKWARD, step.backward))
    }


def with_fastest_order(
    plan: Plan, step: LoweredStep, captured: Captured, ctx: Context, passes: Sequence[Pass]
) -> tuple[Plan, LoweredStep]:
    """The plan with the fastest order within the limit, and its lowered step.

    Without an order that fits, the fastest one. The order does not change if memory holds back no
    collective.

    ``step``: the plan lowered with its present order.
    """
    if not _short_of_room(step):
        return plan, step
    found = [(plan, step)]
    deciding = ctx.replace(deciding=True)
    for in_flight_bytes in _IN_FLIGHT_BYTES:
        few = plan.replace(order={}, in_flight_bytes=in_flight_bytes)
        other = plan.replace(order=orders(predict(captured, few, deciding, passes)))
        if other.order != plan.order:
            found.append((other, predict(captured, other, ctx, passes)))

    def rank(one: tuple[Plan, LoweredStep]) -> tuple[bool, float]:
        prediction = one[1].prediction
        above = ctx.limit_bytes is not None and prediction.peak_bytes > ctx.limit_bytes
        return above, prediction.step_seconds

    return min(found, key=rank)


def _short_of_room(step: LoweredStep) -> bool:
    """Whether the memory limit delays the start of a collective, or forces an early wait."""
    return any(
        HELD_BACK.get(node) is Reason.MEMORY
        for gm in (step.forward, step.backward)
        for node in gm.graph.nodes
    )
