"""Collect: the contents of a page, from a plan and its simulated step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from osdp_compile.reports.page.contents import (
    Alternative,
    Contents,
    FrontierPoint,
    Lanes,
    Measured,
    MemoryCurve,
)
from osdp_compile.reports.page.lanes import lanes_of
from osdp_compile.reports.page.memory_curve import memory_curve
from osdp_compile.reports.page.module_tree import module_tree, plan_rows
from osdp_compile.reports.plan_table import prediction_lines
from passes.simulate.chrome_trace import StepTimeline
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_limit, format_ranks, format_seconds

#: The name of the plan itself in the comparison.
OSDP = "osdp"


@dataclasses.dataclass(frozen=True)
class Sources:
    """The figures that a page shows.

    ``model``: the name of the model. ``hardware``: the name of the profile.
    ``limit_bytes``: the user's limit; the plan's may be lower.
    ``others``: the plans for comparison, by name. ``frontier``: plans by limit.
    ``operators``: whose operators the simulated step has; "": the machine's.
    ``measured``, ``measured_notes``: figures of training, and how they were measured.
    """

    model: str
    hardware: str
    plan: Plan
    timeline: StepTimeline
    limit_bytes: int | None
    others: Mapping[str, Plan] = dataclasses.field(default_factory=dict)
    frontier: Sequence[tuple[int, Plan]] = ()
    measured: Sequence[Measured] = ()
    measured_notes: Sequence[str] = ()
    measured_peak_bytes: int | None = None
    operators: str = ""


def collect(sources: Sources) -> Contents:
    """The data of a page."""
    plan, timeline = sources.plan, sources.timeline
    lanes = lanes_of(timeline)
    memory = memory_curve(timeline, sources.limit_bytes, sources.measured_peak_bytes)
    return Contents(
        title=f"{sources.model} on {format_ranks(plan.world_size)}",
        facts=_facts(sources),
        modules=module_tree(plan, sources.model),
        rows=plan_rows(plan),
        lanes=lanes,
        memory=memory,
        alternatives=_alternatives(sources),
        frontier=tuple(
            FrontierPoint(limit_bytes, said.peak_bytes, said.step_seconds)
            for limit_bytes, one in sources.frontier
            if (said := one.prediction) is not None
        ),
        measured=tuple(sources.measured),
        measured_notes=tuple(sources.measured_notes),
        notes=(
            *([sources.operators] if sources.operators else []),
            *_notes(timeline, lanes, memory),
            *prediction_lines(plan)[2:],
        ),
    )


def _facts(sources: Sources) -> tuple[tuple[str, str], ...]:
    step, limit_bytes = sources.timeline, sources.limit_bytes
    return (
        ("step", format_seconds(step.step_seconds)),
        ("exposed communication", format_seconds(step.exposed_seconds)),
        ("peak memory", format_bytes(step.peak.peak_bytes)),
        ("memory limit", "none" if limit_bytes is None else format_limit(limit_bytes)),
        ("ranks", str(sources.plan.world_size)),
        ("hardware profile", sources.hardware),
    )


def _alternatives(sources: Sources) -> tuple[Alternative, ...]:
    """The plan, as its timeline says, and the others, as predicted."""
    step, limit_bytes = sources.timeline, sources.limit_bytes
    figures = {OSDP: (step.step_seconds, step.exposed_seconds, step.peak.peak_bytes)}
    for name, plan in sources.others.items():
        said = plan.prediction
        assert said is not None
        figures[name] = said.step_seconds, said.exposed_seconds, said.peak_bytes
    return tuple(
        Alternative(name, *own, fits=limit_bytes is None or own[-1] <= limit_bytes)
        for name, own in figures.items()
    )


def _notes(step: StepTimeline, lanes: Lanes, memory: MemoryCurve) -> list[str]:
    """What the drawings leave out."""
    notes = []
    layers = [phase.left_out.layers for phase in step.phases if phase.left_out is not None]
    if layers:
        notes.append(
            f"The simulation has the first and the last layers. The {layers[0]} layers between "
            "them are alike: one bar stands for all, with their time."
        )
    if len(lanes.spans) < lanes.events:
        notes.append(
            f"The timeline draws {len(lanes.spans):,} bars for {lanes.events:,} events: short "
            "neighbours of one kind are merged."
        )
    if memory.moments > 1:
        notes.append(
            f"The memory curve has the highest and the last value of each {memory.moments} moments."
        )
    if memory.unlisted:
        notes.append(
            f"{memory.unlisted:,} buffers smaller than "
            f"{format_bytes(memory.buffers[-1].size_bytes)} are in the curve, but are not listed."
        )
    return notes
