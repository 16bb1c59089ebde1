"""Step timer: timelines of a model's compiled graphs, and measured seconds of its training steps.

A step lasts from one start of the compiled forward to the next. It includes the backward, the
optimizer and everything else in the training loop. On a GPU the host's launches are timed: once
the host runs ahead, the launches follow each other at the rate of the steps. A few steps are traced
call by call (``step_trace.py``).
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

from osdp_compile import _torch
from osdp_compile.tracking.larger_inputs import GrowingPeak
from osdp_compile.tracking.profiler_ranges import ProfilerRanges
from osdp_compile.tracking.step_trace import WARM_STEPS, StepTraces
from passes.simulate.timeline import Timeline
from passes.types.context import Phase

#: Number of step times that are kept.
KEPT_STEPS = 64
_MOST_FRAMES = 256  # in a step: the bound if the last frame never runs again
#: Part of a timeline's base: bytes that earlier frames of the step keep.
OTHER_FRAMES = "other frames"


class CompiledStep:
    """One compilation of a frame: the timelines of its graphs by phase.

    ``frame``: identifies the frame. A recompilation, for other shapes say, has the same frame.
    Equal modules whose code is compiled apart have different frames, by their parameters.
    ``times``: how often a step runs the frame, and alike ones that share its code.
    """

    def __init__(self, frame: Hashable, times: int = 1) -> None:
        self.frame, self.times = frame, times
        self.timelines: dict[Phase, Timeline] = {}
        self.skeletons: dict[Phase, fx.Graph] = {}
        self.ranges = ProfilerRanges()
        #: For graphs with dynamic shapes: bytes of a call at the peak above the prediction.
        self.growing: dict[Phase, GrowingPeak] = {}
        #: Bytes that the forward returns to its caller. The caller holds them in the backward.
        self.returned_bytes = 0
        #: Bytes that are alive from the end of the forward to the backward.
        self.kept_bytes = 0
        #: At the end of the forward, the time since a collective ended.
        self.idle_seconds = 0.0
        #: The parameters that the graphs read.
        self.parameters: frozenset[str] = frozenset()
        #: A warning has said that the peak is above the limit.
        self.is_above = False

    @property
    def peak_bytes(self) -> int:
        """The highest peak of the graphs that are compiled by now."""
        return max((one.peak_bytes for one in self.timelines.values()), default=0)

    def larger_input_bytes(self, args: Sequence[Any]) -> int:
        """Bytes of a call above :attr:`peak_bytes`, because of the sizes of its inputs."""
        peaks = (
            one.peak_bytes + (self.growing[phase].more_bytes(args) if phase in self.growing else 0)
            for phase, one in self.timelines.items()
        )
        return max(0, max(peaks, default=0) - self.peak_bytes)

    @property
    def counted_frames_bytes(self) -> int:
        """Bytes kept by earlier frames of the step, as the graphs of this one count them."""
        forward = self.timelines.get(Phase.FORWARD)
        return forward.base.get(OTHER_FRAMES, 0) if forward is not None else 0


class Observed:
    """Compiled frames and step times of one model.

    ``in_step``: the frames that one step runs with gradients, in execution order, each as often
    as it runs. Several frames come from graph breaks.
    ``traces``: the steps that are traced call by call; None: none are.
    """

    def __init__(self) -> None:
        self.in_step: tuple[Hashable, ...] = ()
        self.traces: StepTraces | None = None
        self._compiled: dict[Hashable, CompiledStep] = {}
        self._last: CompiledStep | None = None
        self._under_way: collections.deque[Hashable] = collections.deque(maxlen=_MOST_FRAMES)
        self._steps_seconds: collections.deque[float] = collections.deque(maxlen=KEPT_STEPS)
        self._started: float | None = None
        self._leave_out = False  # the step under way
        self._leave_out_next = False
        self._since_compiled = 0  # steps that were timed since then

    @property
    def graphs(self) -> list[CompiledStep]:
        """The last compilation of each frame of :attr:`in_step`; before the first step, of all."""
        return [self._compiled[frame] for frame in self.in_step or self._compiled]

    def before(self, frame: Hashable) -> list[CompiledStep]:
        """The frames that run in a step before the last run of a given frame.

        If no step ran the frame yet, these are the frames of the last step and those begun since.
        """
        order = [*self.in_step, *self._under_way]
        if frame in self.in_step:
            order = order[: len(self.in_step) - 1 - self.in_step[::-1].index(frame)]
        return [self._compiled[one] for one in order if one in self._compiled]

    def compiled(self, step: CompiledStep, phase: Phase, timeline: Timeline) -> None:
        """Keep a graph's timeline. After a forward, steps are timed from this frame's starts."""
        step.timelines[phase] = timeline
        self.interrupted()
        if phase is not Phase.FORWARD:
            return
        if self._last is None or self._last.frame != step.frame:
            self._steps_seconds.clear()
            self._started = None
        if step.frame not in self._compiled:  # it continues where the last frame stopped
            self._under_way.extendleft(reversed(self.in_step))
        self._compiled[step.frame] = self._last = step
        # The forward is compiled before its first start: leave out the step that follows.
        self._leave_out_next = True
        self._since_compiled = 0
        if self.traces is not None:
            self.traces.restart()

    def interrupted(self) -> None:
        """A graph is being compiled: leave the current step out of the times."""
        self._leave_out = True
        if self.traces is not None:
            self.traces.interrupted()

    def forward_started(self, frame: Hashable) -> None:
        """Record the start of a frame's compiled forward."""
        self._under_way.append(frame)
        if self._last is None or self._last.frame != frame:
            return  # one frame is enough to time a step
        if self._under_way.count(frame) < self._last.times:
            return
        self.in_step = tuple(self._under_way)
        self._under_way.clear()
        now = time.perf_counter()
        if self._started is not None and not self._leave_out:
            self._steps_seconds.append(now - self._started)
            self._since_compiled += 1
        if self.traces is not None:
            self.traces.next_step(now, self._last.skeletons)
        self._started = now
        self._leave_out, self._leave_out_next = self._leave_out_next, False

    def traces_of(self, step: CompiledStep) -> StepTraces | None:
        """The traces, if the step that has just begun is traced.

        It is not while anything is new. It must be of one frame, and of its last compilation.
        """
        if self._since_compiled < WARM_STEPS or len(self.in_step) != 1 or self._under_way:
            return None
        if step is not self._last or self.traces is None or self.traces.is_over:
            return None
        return self.traces

    @property
    def steps(self) -> int:
        """Number of steps behind :attr:`step_seconds`."""
        return len(self._steps_seconds)

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps, without the first step after each compilation."""
        return statistics.median(self._steps_seconds) if self._steps_seconds else None


def timed(
    function: Callable[..., Any], observed: Observed, step: CompiledStep
) -> Callable[..., Any]:
    """Wrap the compiled function of a trained frame; the wrapper records each start.

    It wraps the result of AOTAutograd and Inductor, not the compiler of one graph. Inductor
    inspects the type of that compiler (for CUDA graphs), and a wrapper would hide it.
    """

    def stamped(*args: Any, **kwargs: Any) -> Any:
        observed.forward_started(step.frame)
        if _torch.autograd.is_profiled():
            return step.ranges.forward(function, args, kwargs)
        traces = observed.traces_of(step)
        if traces is not None:
            return traces.forward(function, args, kwargs)
        return function(*args, **kwargs)

    return _torch.aot_autograd.with_attributes(stamped, function)
