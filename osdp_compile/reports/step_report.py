"""Step report: predicted and measured time and memory of a model's training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from osdp_compile.calibration.evidence import StepParts, typical
from osdp_compile.errors import OsdpError
from osdp_compile.planning.alternatives import SearchedStep
from osdp_compile.reports.cpu_memory import leaves_out
from osdp_compile.reports.memory_plot import draw_memory
from osdp_compile.reports.page.collect import Sources
from osdp_compile.reports.page.contents import Measured
from osdp_compile.reports.page.page import check_page, save_page
from osdp_compile.reports.plan_table import plain_text, shortened
from osdp_compile.runtime.meshes import local_part
from osdp_compile.tracking.session import Session, base_parts, session_for
from passes.annotate.training_state import more_earlier_gradients
from passes.simulate.chrome_trace import StepTimeline, optimizer_timeline
from passes.simulate.timeline import Buffer, Event, Timeline
from passes.types.context import Phase
from passes.types.learned import Learned
from passes.types.plan import Plan
from passes.types.units import each_of, format_bytes, format_limit, format_seconds

#: Number of measured steps below which no step time is reported.
LEAST_STEPS = 3
#: Numbers of buffers and exposed collectives that are printed; the report holds all.
SHOWN_BUFFERS = 10
SHOWN_EXPOSED = 8
#: Share of the step. Below this exposed time the table of exposed collectives is left out.
_LEAST_EXPOSED = 0.002
_SAVED = "saved by other graphs"


@dataclasses.dataclass(frozen=True)
class Report:
    """Prediction and measurement of one training step on this rank. Prints as tables.

    Attributes:
        timeline: the simulated step: forward, backward and optimizer.
        measured_step_seconds: the median of ``measured_steps`` steps, from the start of one forward
            to the next; None for too few steps.
        measured_peak_bytes: the given peak, or on CUDA the allocator's; None: there is neither.
        entered_late: the given peak was measured without the model's own parameters, and is not in
            the report.
        on_cuda: the model is on CUDA.
        measured_parts: the typical step among those that were traced call by call
            (``osdp_compile/tracking/step_trace.py``); None before the first, and on CUDA.
        learned: the corrections of the hardware profile behind the prediction.
        model: the name of the model's class. ``hardware``: the name of the profile.
        searched: compares with other plans; None on ranks that did not search the plan, and where
            the report was sent to another process.
        trained_graphs: number of graphs that a step runs in sequence; more than one comes from
            graph breaks. The timeline has the last compilation of each graph.
    """

    model: str
    hardware: str
    plan: Plan
    world_size: int
    memory_limit_bytes: int | None
    timeline: StepTimeline
    measured_step_seconds: float | None
    measured_steps: int
    measured_peak_bytes: int | None
    on_cuda: bool
    trained_graphs: int
    entered_late: bool = False
    measured_parts: StepParts | None = None
    learned: Learned = dataclasses.field(default_factory=Learned)
    searched: SearchedStep | None = dataclasses.field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "searched": None}  # it is of this process

    @property
    def predicted_step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def predicted_exposed_seconds(self) -> float:
        """Time in the step during which compute waits for communication."""
        return self.timeline.exposed_seconds

    @property
    def exposed(self) -> tuple[tuple[str, Event], ...]:
        """The collectives that compute waits for, with their phase, the longest wait first."""
        found = [
            (phase.phase, event)
            for phase in self.timeline.phases
            for event in phase.events
            if event.exposed_seconds > 0
        ]
        return tuple(sorted(found, key=lambda one: -one[1].exposed_seconds))

    @property
    def predicted_peak_bytes(self) -> int:
        return self.timeline.peak.peak_bytes

    @property
    def peak_phase(self) -> str:
        """The phase of the predicted peak."""
        return self.timeline.peak.phase

    @property
    def peak_buffers(self) -> tuple[Buffer, ...]:
        """The buffers alive at the predicted peak, largest first."""
        return self.timeline.peak.peak_buffers

    @property
    def peak_bytes_by_kind(self) -> dict[str, int]:
        """The predicted peak by kind of buffer, largest first; the values add up to it."""
        kinds: dict[str, int] = {}
        for buffer in self.peak_buffers:
            kinds[buffer.kind] = kinds.get(buffer.kind, 0) + buffer.size_bytes
        return dict(sorted(kinds.items(), key=lambda kind: -kind[1]))

    def save_trace(self, path: str | Path) -> None:
        """Write the simulated step as a trace that Perfetto and Chrome read."""
        self.timeline.save(path)

    def save_memory_picture(self, path: str | Path) -> None:
        """Draw the predicted memory over the step; the suffix of the path selects the format.

        Raises:
            ImportError: without matplotlib, an extra of this package.
        """
        draw_memory(self.timeline, path, self.memory_limit_bytes, self.measured_peak_bytes)

    def save_html(self, path: str | Path) -> None:
        """Write the report as one HTML page, which needs no network.

        The page compares with DDP, ZeRO-2 and FSDP on the rank that searched the plan.

        Raises:
            ImportError: without Bokeh, an extra of this package.
        """
        check_page("save_html")
        sources = Sources(
            model=self.model,
            hardware=self.hardware,
            plan=self.plan,
            timeline=self.timeline,
            limit_bytes=self.memory_limit_bytes,
            others={} if self.searched is None else self.searched.alternatives(),
            measured=[Measured(*cells) for cells in _compared(self)],
            measured_notes=_notes(self),
            measured_peak_bytes=self.measured_peak_bytes,
        )
        save_page(sources, path, "save_html")

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [_side_by_side(self), Text("\n".join(_notes(self)))]
        if self.predicted_exposed_seconds > _LEAST_EXPOSED * self.predicted_step_seconds:
            parts.append(_exposed(self))
        parts.append(_by_kind(self))
        if not all(buffer.is_part for buffer in self.peak_buffers):
            parts.append(_largest(self))
        return Group(*parts)

    def __str__(self) -> str:
        return plain_text(self)


def report(model: nn.Module, *, peak_bytes: int | None = None) -> Report:
    """Compare prediction and measurement of a model in training.

    Args:
        model: the module, or the result of ``torch.compile`` for it.
        peak_bytes: the measured peak. On the CPU it comes from the caller:
            ``PeakMemory().peak_bytes``. On CUDA the default is the allocator's.

    Raises:
        OsdpError: if the model has no plan, or its backward has not been compiled yet.

    Example:

        for batch in batches:
            train_step(batch)
        print(osdp_compile.report(model))
    """
    session = session_for(model)
    if session is None:
        raise OsdpError(
            "this model has no plan yet: call the result of torch.compile(model, backend='osdp'), "
            "with gradients and with two ranks or more, and run its backward"
        )
    observed = session.observed
    graphs = observed.graphs
    missing = [
        phase.value
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        if not graphs or any(phase not in graph.timelines for graph in graphs)
    ]
    if missing:
        raise OsdpError(
            f"the {' and '.join(missing)} of this model has not been compiled yet: run one "
            "training step, forward and backward"
        )
    device = next(model.parameters()).device
    if peak_bytes is None and device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    entered_late = peak_bytes is not None and leaves_out(peak_bytes, _own_parts(model))
    enough = observed.steps >= LEAST_STEPS
    traced = observed.traces.steps if observed.traces is not None else []
    return Report(
        model=type(getattr(model, "_orig_mod", model)).__name__,
        hardware=session.context.hardware.name,
        plan=session.plan,
        world_size=session.plan.world_size,
        memory_limit_bytes=session.options.memory_limit_bytes,
        timeline=_step_timeline(session),
        measured_step_seconds=observed.step_seconds if enough else None,
        measured_steps=observed.steps,
        measured_peak_bytes=None if entered_late else peak_bytes,
        on_cuda=device.type == "cuda",
        trained_graphs=len(graphs),
        entered_late=entered_late,
        measured_parts=typical(traced).parts() if traced else None,
        learned=session.context.hardware.in_force,
        searched=session.searched,
    )


def _own_parts(model: nn.Module) -> Iterator[torch.Tensor]:
    """The local tensors of a model's parameters."""
    for parameter in model.parameters():
        detached = parameter.detach()
        yield local_part(detached)


def _step_timeline(session: Session) -> StepTimeline:
    """All forwards, their backwards in reverse, and the optimizer's step."""
    graphs = session.observed.graphs
    phases: list[Timeline] = []
    saved_bytes: list[int] = []  # by each forward, for its backward
    for graph in graphs:
        forward = graph.timelines[Phase.FORWARD]
        phases.append(forward.beside({_SAVED: sum(saved_bytes)}))
        saved_bytes.append(forward.kept_bytes)
    gradient_bytes = 0
    for graph in reversed(graphs):
        saved_bytes.pop()
        backward = graph.timelines[Phase.BACKWARD]
        phases.append(backward.beside({_SAVED: sum(saved_bytes), "gradients": gradient_bytes}))
        gradient_bytes += backward.kept_bytes
    more = more_earlier_gradients(session.context, session.plan, gradient_bytes)
    phases = [phase.beside(more) for phase in phases]
    base = base_parts(session)
    phases.append(optimizer_timeline(session.context, session.plan, base, gradient_bytes))
    return StepTimeline(tuple(phases), session.plan.world_size)


def _side_by_side(said: Report) -> Table:
    limit = said.memory_limit_bytes
    table = Table(
        title=f"training step on {each_of(said.world_size)}, "
        + (f"limit {format_limit(limit)}" if limit is not None else "no memory limit"),
        title_justify="left",
        header_style="bold",
    )
    table.add_column("", no_wrap=True)
    for column in ("predicted", "measured"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("predicted / measured", justify="right")
    for cells in _compared(said):
        table.add_row(*cells)
    return table


def _compared(said: Report) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the comparison: name, predicted, measured, and the quotient of both."""
    step, peak = said.measured_step_seconds, said.measured_peak_bytes
    yield (
        "step",
        format_seconds(said.predicted_step_seconds),
        format_seconds(step) if step is not None else "not measured yet",
        _ratio(said.predicted_step_seconds, step),
    )
    for part, predicted, measured in _parts(said):
        yield (
            f"  {part}",
            format_seconds(predicted),
            format_seconds(measured) if measured is not None else "",
            _ratio(predicted, measured),
        )
    yield (
        "peak memory",
        format_bytes(said.predicted_peak_bytes),
        format_bytes(peak) if peak is not None else "not measured",
        _ratio(said.predicted_peak_bytes, peak),
    )


def _parts(said: Report) -> Iterator[tuple[str, float, float | None]]:
    """Parts of the step: name, predicted and measured seconds (None: not measured)."""
    measured = said.measured_parts
    seconds: dict[str, float] = {}
    if measured is not None:
        seconds = {
            "forward": measured.forward_seconds,
            "backward": measured.backward_seconds,
            "exposed communication": measured.wait_seconds,
            "optimizer and loop": measured.rest_seconds,
        }
    predicted = dict.fromkeys(("forward", "backward"), 0.0)
    *graphs, optimizer = said.timeline.phases
    for graph in graphs:
        predicted[graph.phase] += graph.step_seconds
    predicted["exposed communication"] = said.predicted_exposed_seconds
    predicted["optimizer and loop"] = optimizer.step_seconds
    for part, predicted_seconds in predicted.items():
        yield part, predicted_seconds, seconds.get(part)


def _ratio(predicted: float, measured: float | None) -> str:
    return f"{predicted / measured:.2f}" if measured else ""


def _exposed(said: Report) -> Table:
    table = Table(title="exposed communication, predicted", title_justify="left")
    table.add_column("collective", overflow="fold")
    table.add_column("phase")
    table.add_column("exposed", justify="right")
    table.add_column("of", justify="right")
    table.add_column("why", overflow="fold")
    for phase, event in said.exposed[:SHOWN_EXPOSED]:
        table.add_row(
            Text(shortened(event.label)),
            phase,
            format_seconds(event.exposed_seconds),
            format_seconds(event.seconds),
            event.reason,
        )
    rest = said.exposed[SHOWN_EXPOSED:]
    if rest:
        seconds = sum(event.exposed_seconds for _, event in rest)
        table.add_row(f"{len(rest)} more", "", format_seconds(seconds), "", "")
    return table


def _by_kind(said: Report) -> Table:
    table = Table(title=f"the predicted peak, in the {said.peak_phase}", title_justify="left")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for kind, size_bytes in said.peak_bytes_by_kind.items():
        share = f"{size_bytes / said.predicted_peak_bytes:.0%}"
        table.add_row(kind, format_bytes(size_bytes), share)
    return table


def _largest(said: Report) -> Table:
    tensors = [buffer for buffer in said.peak_buffers if not buffer.is_part]
    table = Table(title="largest tensors of the step at the peak", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("origin", overflow="fold")
    for buffer in tensors[:SHOWN_BUFFERS]:
        size = format_bytes(buffer.size_bytes)
        table.add_row(Text(buffer.name), buffer.kind, size, Text(shortened(buffer.label)))
    if len(tensors) > SHOWN_BUFFERS:
        rest = tensors[SHOWN_BUFFERS:]
        size = format_bytes(sum(buffer.size_bytes for buffer in rest))
        table.add_row(f"{len(rest)} more", "", size, "")
    return table


def _notes(said: Report) -> list[str]:
    """The sources of the figures, and how to get missing ones."""
    notes = []
    if said.measured_step_seconds is None:
        notes.append(
            f"step: {said.measured_steps} measured so far, at least {LEAST_STEPS} are needed (the "
            "first after a compilation does not count)"
        )
    else:
        notes.append(
            f"step: median of {said.measured_steps}, from the start of one forward to the next"
        )
    if said.measured_parts is not None:
        notes.append(
            f"parts of the step: the middle half of {said.measured_parts.steps} traced steps"
        )
    if said.learned.steps:
        notes.append(f"predicted with what {said.learned.steps} steps taught: {said.learned}")
    if said.on_cuda:
        notes.append("peak: the allocator's, since torch.cuda.reset_peak_memory_stats()")
    elif said.entered_late:
        notes.append(
            "peak: osdp_compile.PeakMemory() was entered after the model was built, and did not "
            "count it. Build and train the model inside it"
        )
    elif said.measured_peak_bytes is None:
        notes.append(
            "peak: to measure it, build and train the model inside osdp_compile.PeakMemory() and "
            "give its peak_bytes: report(model, peak_bytes=...)"
        )
    if said.trained_graphs > 1:
        notes.append(
            f"the step runs as {said.trained_graphs} compiled graphs (graph breaks), one after the "
            "other: no communication overlaps from one graph to the next"
        )
    return notes
