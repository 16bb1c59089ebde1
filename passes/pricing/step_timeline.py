"""Step timeline: a lowered step as the timelines of its forward, backward and optimizer.

Of a folded step, the time of the layers left out is one event of compute and one stall, at their
place. The timelines add up to the prediction.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from torch import fx

from passes.capture.fold_layers import Folded, Seconds
from passes.ops.markers import LEFT_OUT
from passes.pricing.predict import LoweredStep
from passes.simulate.chrome_trace import StepTimeline, optimizer_timeline
from passes.simulate.timeline import COMPUTE, Event, LeftOut, Stall, Timeline, timeline_of
from passes.types.annotations import Reason
from passes.types.context import Context, Phase
from passes.types.plan import Plan

_NAME = "left_out"
#: A smaller share of a time is the rounding of sums.
_ROUNDING = 1e-9
_Span = TypeVar("_Span", Event, Stall)


def step_timeline(
    step: LoweredStep, plan: Plan, ctx: Context, folded: Folded | None = None
) -> StepTimeline:
    """The timelines of a lowered step.

    ``folded``: the step that was lowered, if it lacks layers.
    """
    phases = []
    for gm, simulation, phase, returned_bytes, unseen in zip(
        (step.forward, step.backward),
        step.simulations,
        (Phase.FORWARD, Phase.BACKWARD),
        (0, step.returned_bytes),
        step.unseen,
        strict=True,
    ):
        base = {**step.base, "returned": returned_bytes}
        timeline = timeline_of(gm.graph, simulation, phase=phase.value, base=base)
        if folded is not None:
            timeline = _with_layers(timeline, gm.graph, unseen, folded)
        phases.append(timeline)
    phases.append(optimizer_timeline(ctx, plan, step.base, phases[-1].kept_bytes))
    return StepTimeline(tuple(phases), ctx.world_size)


def _with_layers(timeline: Timeline, graph: fx.Graph, unseen: Seconds, folded: Folded) -> Timeline:
    """The timeline with the time of the layers left out."""
    places = [place for place, node in enumerate(graph.nodes) if node.target is LEFT_OUT]
    first, last = places[0], places[-1]
    start = timeline.places_seconds[last]
    inner = folded.inner
    label = f"layers {inner[0]} to {inner[-1]}, {len(inner)} alike"
    reason = _reason(timeline, folded)
    left_out = LeftOut(_NAME, label, reason, len(inner), first, last, start, start + unseen.step)

    def later(seconds: float) -> float:
        return seconds + unseen.step if seconds > start else seconds

    def moved(one: _Span) -> _Span:
        # A collective that is in flight at the gap ends before it.
        if one.start_seconds < start:
            return one
        return dataclasses.replace(
            one,
            start_seconds=one.start_seconds + unseen.step,
            end_seconds=one.end_seconds + unseen.step,
        )

    waits = unseen.step - unseen.compute > _ROUNDING * unseen.step
    computed = start + (unseen.compute if waits else unseen.step)
    own = Event(_NAME, label, COMPUTE, start, computed)
    stalls = [Stall(_NAME, label, computed, left_out.end_seconds)] if waits else []
    return dataclasses.replace(
        timeline,
        step_seconds=timeline.step_seconds + unseen.step,
        events=_by_start(*map(moved, timeline.events), own),
        stalls=_by_start(*map(moved, timeline.stalls), *stalls),
        memory=tuple((later(seconds), size_bytes) for seconds, size_bytes in timeline.memory),
        peak_seconds=later(timeline.peak_seconds),
        places_seconds=tuple(
            seconds + unseen.step if where > last else seconds
            for where, seconds in enumerate(timeline.places_seconds)
        ),
        left_out=left_out,
    )


def _reason(timeline: Timeline, folded: Folded) -> str:
    """The cause of most of the waits of the layers at the gap.

    Without waits there, the layers left out take as long as their collectives: the network is busy.
    """
    own = {name for layer in folded.at_the_cut for name in folded.layers[layer - 1]}
    seconds: dict[str, float] = {}
    for event in timeline.events:
        if event.reason and own.intersection(event.serves):
            seconds[event.reason] = seconds.get(event.reason, 0.0) + event.exposed_seconds
    return max(seconds, key=seconds.__getitem__, default=Reason.NO_COMPUTE.value)


def _by_start(*spans: _Span) -> tuple[_Span, ...]:
    return tuple(sorted(spans, key=lambda one: one.start_seconds))
