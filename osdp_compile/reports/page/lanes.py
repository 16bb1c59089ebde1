"""Lanes: the simulated step as bars, one lane for each stream; short neighbours are merged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from osdp_compile.reports.page.contents import Gap, Lanes, Span, Waits
from osdp_compile.reports.plan_table import shortened
from passes.simulate.chrome_trace import StepTimeline
from passes.simulate.timeline import COMPUTE, NETWORK, Event, Timeline

#: Bars of one lane. A browser draws some thousand without a delay.
MOST_SPANS = 1500
#: Names that a bar lists.
_SHOWN_NAMES = 8
_PHASES, _WAITS = "phases", "waiting"
#: Kinds of bars beside the phases' names, which are the kinds of kernels.
GATHER, REDUCE, WAIT, LEFT_OUT = "gather", "reduce", "wait", "layers left out"


def lanes_of(step: StepTimeline, most: int = MOST_SPANS) -> Lanes:
    """The bars of a step. ``most``: number of bars of a lane."""
    streams = (event.stream for phase in step.phases for event in phase.events)
    names = tuple(dict.fromkeys([_PHASES, COMPUTE, _WAITS, NETWORK, *streams]))
    by_lane: list[list[Span]] = [[] for _ in names]
    for start_seconds, phase in step.placed():
        for span in _spans(start_seconds, phase, names):
            by_lane[span.lane].append(span)
    return Lanes(
        names=names,
        spans=tuple(span for lane in by_lane for span in _merged(lane, step.step_seconds, most)),
        waits=_waits(by_lane[names.index(_WAITS)]),
        gaps=tuple(
            Gap(gap.label, start_seconds + gap.start_seconds, start_seconds + gap.end_seconds)
            for start_seconds, phase in step.placed()
            if (gap := phase.left_out) is not None
        ),
        step_seconds=step.step_seconds,
        events=sum(map(len, by_lane)),
    )


def _spans(at: float, phase: Timeline, names: Sequence[str]) -> Iterator[Span]:
    """The bars of one phase, which starts at second ``at``."""

    def span(stream: str, kind: str, label: str, start: float, end: float, **more: object) -> Span:
        lane = names.index(stream)
        return Span(lane, kind, phase.phase, label, at + start, at + end, **more)  # type: ignore[arg-type]

    yield span(_PHASES, phase.phase, phase.phase, 0.0, phase.step_seconds)
    for event in sorted(phase.events, key=lambda one: one.start_seconds):
        label = shortened(event.label)
        yield span(
            event.stream,
            _kind(event, phase),
            label,
            event.start_seconds,
            event.end_seconds,
            exposed_seconds=event.exposed_seconds,
            reason=event.reason,
            serves=_shown(event.serves),
        )
    causes = {event.name: event.reason for event in phase.events if event.stream != COMPUTE}
    if phase.left_out is not None:
        causes[phase.left_out.name] = phase.left_out.reason
    for stall in phase.stalls:
        yield span(
            _WAITS,
            WAIT,
            f"waits for {shortened(stall.label)}",
            stall.start_seconds,
            stall.end_seconds,
            exposed_seconds=stall.seconds,
            reason=causes.get(stall.waits_for, ""),
        )


def _shown(names: Sequence[str]) -> tuple[str, ...]:
    more = len(names) - _SHOWN_NAMES
    return (*names[:_SHOWN_NAMES], f"and {more} more") if more > 0 else tuple(names)


def _kind(event: Event, phase: Timeline) -> str:
    """The kind of a bar: of a kernel its phase, of a collective what it does."""
    if event.stream != COMPUTE:
        return REDUCE if event.label.startswith(REDUCE) else GATHER
    is_gap = phase.left_out is not None and event.name == phase.left_out.name
    return LEFT_OUT if is_gap else phase.phase


def _waits(spans: Iterable[Span]) -> tuple[Waits, ...]:
    """The waits by cause, the longest first."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.reason, []).append(span)
    waits = (
        Waits(reason, len({one.label for one in own}), sum(one.seconds for one in own))
        for reason, own in found.items()
    )
    return tuple(sorted(waits, key=lambda one: -one.seconds))


def _merged(spans: list[Span], step_seconds: float, most: int) -> list[Span]:
    """Merge short neighbours of one kind, until few enough bars are left."""
    found = spans
    for power in itertools.count(-20):
        if len(found) <= most or power > 0:
            return found
        longest = step_seconds * 2.0**power
        found = list(itertools.chain(*map(_as_one, _runs(spans, longest))))
    raise AssertionError


def _runs(spans: Iterable[Span], longest_seconds: float) -> Iterator[list[Span]]:
    """Runs of neighbours of one kind; a run of several is at most this long."""
    run: list[Span] = []
    for span in spans:
        alike = run and (span.kind, span.phase, span.reason) == (
            run[0].kind,
            run[0].phase,
            run[0].reason,
        )
        if run and not (alike and span.end_seconds - run[0].start_seconds <= longest_seconds):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _as_one(run: Sequence[Span]) -> Iterator[Span]:
    if len(run) == 1:
        yield run[0]
        return
    longest = max(run, key=lambda one: one.seconds)
    yield Span(
        run[0].lane,
        run[0].kind,
        run[0].phase,
        f"{len(run)} short ones, the longest: {longest.label}",
        run[0].start_seconds,
        max(one.end_seconds for one in run),
        events=len(run),
        exposed_seconds=math.fsum(one.exposed_seconds for one in run),
        reason=run[0].reason,
        serves=_shown(tuple(dict.fromkeys(name for one in run for name in one.serves))),
    )
