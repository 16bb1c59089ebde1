"""The timeline of a training step, and its export as a Chrome trace.

The trace uses the trace-event format (JSON) of Perfetto and Chrome's ``about:tracing``. It has
one thread for each stream, one thread for the phases, and a counter for the memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from passes.annotate.training_state import at_optimizer, optimizer_seconds
from passes.simulate.timeline import COMPUTE, NETWORK, Event, Timeline, largest_first, part_buffers
from passes.types.context import Context
from passes.types.plan import Plan
from passes.types.units import each_of

_FIRST_THREADS = ("phases", COMPUTE, NETWORK)
_PROCESS = 0


@dataclasses.dataclass(frozen=True)
class StepTimeline:
    """The graphs of one step in execution order. All ``world_size`` ranks run the same."""

    phases: tuple[Timeline, ...]
    world_size: int = 1

    @property
    def step_seconds(self) -> float:
        return sum(phase.step_seconds for phase in self.phases)

    @property
    def compute_seconds(self) -> float:
        return sum(phase.compute_seconds for phase in self.phases)

    @property
    def exposed_seconds(self) -> float:
        return sum(phase.exposed_seconds for phase in self.phases)

    @property
    def peak(self) -> Timeline:
        """The phase with the highest memory peak; the first one on a tie."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    def placed(self) -> Iterator[tuple[float, Timeline]]:
        """Pairs (start within the step in seconds, phase)."""
        start_seconds = 0.0
        for phase in self.phases:
            yield start_seconds, phase
            start_seconds += phase.step_seconds

    def to_chrome_trace(self) -> dict[str, Any]:
        """The step as a trace. ``json.dump`` of it is a file for a trace viewer."""
        streams = [event.stream for phase in self.phases for event in phase.events]
        names = dict.fromkeys([*_FIRST_THREADS, *streams])
        threads = {name: number for number, name in enumerate(names)}
        events = _metadata(self.world_size, threads)
        for start_seconds, phase in self.placed():
            events.append(
                _complete(
                    threads["phases"],
                    phase.phase,
                    phase.phase,
                    start_seconds,
                    start_seconds + phase.step_seconds,
                    {"peak_bytes": phase.peak_bytes},
                )
            )
            events.extend(_phase_events(phase, start_seconds, threads))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, for https://ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.to_chrome_trace()) + "\n")


def optimizer_timeline(
    ctx: Context, plan: Plan, base: Mapping[str, int], kept_bytes: int
) -> Timeline:
    """The optimizer step, with the costs of :func:`passes.pricing.predict.predict`.

    It is one event with constant memory.

    ``base``: bytes by part that this rank holds between steps.
    ``kept_bytes``: bytes that the backward leaves alive.
    """
    seconds = optimizer_seconds(ctx, plan)
    held = at_optimizer(ctx, plan, base, kept_bytes)
    parts = {part: size_bytes for part, size_bytes in held.items() if size_bytes}
    total_bytes = sum(parts.values())
    return Timeline(
        phase="optimizer",
        step_seconds=seconds,
        events=(Event("optimizer", "optimizer step", COMPUTE, 0.0, seconds),) if seconds else (),
        stalls=(),
        memory=((0.0, total_bytes), (seconds, total_bytes)),
        base={part: size_bytes for part, size_bytes in parts.items() if part in base},
        peak_bytes=total_bytes,
        peak_seconds=0.0,
        peak_at="optimizer",
        peak_buffers=largest_first(part_buffers(parts)),
    )


def _phase_events(
    phase: Timeline, at: float, threads: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Trace events of one phase that starts at second ``at``; sorted by start on each thread."""
    spans = []
    for event in phase.events:
        about: dict[str, Any] = {"node": event.name}
        if event.serves:
            about["serves"] = list(event.serves)
        if event.stream != COMPUTE:
            about["exposed_us"] = _microseconds(event.exposed_seconds)
            if event.reason:
                about["why exposed"] = event.reason
        spans.append(
            (threads[event.stream], event.label, event.start_seconds, event.end_seconds, about)
        )
    for stall in phase.stalls:
        about = {"waits_for": stall.waits_for}
        label = f"idle: {stall.label}"
        spans.append((threads[COMPUTE], label, stall.start_seconds, stall.end_seconds, about))
    for thread, label, start, end, about in sorted(spans, key=lambda span: (span[0], span[2])):
        yield _complete(thread, label, phase.phase, at + start, at + end, about)
    # A viewer draws only the last of several changes at one time. Emit the highest one first, so
    # that a peak of zero duration is in the trace.
    for seconds, size_bytes in highest_of_each_moment(phase.memory):
        yield {
            "ph": "C",
            "name": "memory",
            "cat": phase.phase,
            "pid": _PROCESS,
            "ts": _microseconds(at + seconds),
            "args": {"bytes": size_bytes},
        }


def highest_of_each_moment(
    memory: tuple[tuple[float, int], ...],
) -> Iterator[tuple[float, int]]:
    """Reduce several memory changes at one time to the highest, and the last if it differs.

    ``memory``: pairs (seconds, bytes), ascending in seconds. The result has the same form.
    """
    index = 0
    while index < len(memory):
        end = index
        while end < len(memory) and memory[end][0] == memory[index][0]:
            end += 1
        highest = max(size_bytes for _, size_bytes in memory[index:end])
        yield memory[index][0], highest
        if memory[end - 1][1] != highest:
            yield memory[end - 1]
        index = end


def _metadata(world_size: int, threads: Mapping[str, int]) -> list[dict[str, Any]]:
    process = f"predicted training step ({each_of(world_size)})"
    events = [_named("process_name", process, 0)]
    for thread, number in threads.items():
        events.append(_named("thread_name", thread, number))
        order = _named("thread_sort_index", "", number)
        order["args"] = {"sort_index": number}
        events.append(order)
    return events


def _named(what: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _complete(
    thread: int, name: str, category: str, start: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    """A complete event from ``start`` to ``end``, in seconds."""
    # Round both ends, not the duration: neighbours still touch.
    begins, ends = _microseconds(start), _microseconds(end)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": thread,
        "ts": begins,
        "dur": round(ends - begins, 3),
        "args": about,
    }


def _microseconds(seconds: float) -> float:
    """Convert to microseconds, rounded to the nanosecond as in viewers."""
    return round(seconds * 1e6, 3)
