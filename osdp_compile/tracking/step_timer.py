"""What is seen of a model's training: its graphs as they were compiled, and how long steps take.

A step is the time from one start of the compiled forward to the next one, so it holds the
backward, the optimizer, and whatever else the training loop does. On a GPU these are the
starts of the launches: as soon as the host runs ahead, they follow each other as fast as
the steps are done.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from osdp_compile.tracking.larger_inputs import GrowingPeak
from passes.simulate.timeline import Timeline
from passes.types.context import Phase

#: How many steps are remembered.
KEPT_STEPS = 64
_MOST_FRAMES = 256  # in a step; should the last one never run again, no more are kept
#: Of a timeline's base: what frames of the step that ran before keep.
OTHER_FRAMES = "other frames"


class CompiledStep:
    """One compilation of a frame: the timelines of its graphs by phase.

    ``frame``: the same when the frame is compiled again, for other shapes say. Alike modules that
    are compiled apart have frames of their own, by their parameters.
    """

    def __init__(self, frame: Hashable) -> None:
        self.frame = frame
        self.timelines: dict[Phase, Timeline] = {}
        #: For graphs of any size: what calls take at their peaks above the prediction.
        self.growing: dict[Phase, GrowingPeak] = {}
        #: Bytes that the forward returns to its caller, who holds them during the backward.
        self.returned_bytes = 0
        #: Bytes that are there from the end of the forward to the backward.
        self.kept_bytes = 0
        #: The parameters that the graphs read.
        self.parameters: frozenset[str] = frozenset()
        #: Whether it was said that it is above the limit.
        self.is_above = False

    @property
    def peak_bytes(self) -> int:
        """The highest of its graphs, those that are compiled by now."""
        return max((one.peak_bytes for one in self.timelines.values()), default=0)

    def larger_input_bytes(self, args: Sequence[Any]) -> int:
        """What a call takes above :attr:`peak_bytes` by the sizes of its inputs."""
        peaks = (
            one.peak_bytes + (self.growing[phase].more_bytes(args) if phase in self.growing else 0)
            for phase, one in self.timelines.items()
        )
        return max(0, max(peaks, default=0) - self.peak_bytes)

    @property
    def counted_frames_bytes(self) -> int:
        """What earlier frames of the step keep, which its graphs count."""
        forward = self.timelines.get(Phase.FORWARD)
        return forward.base.get(OTHER_FRAMES, 0) if forward is not None else 0


class Observed:
    """What is seen of one model.

    ``in_step``: the frames that one step runs with gradients, in that order (more than one: graph
    breaks), each as often as it runs.
    """

    def __init__(self) -> None:
        self.in_step: tuple[Hashable, ...] = ()
        self._compiled: dict[Hashable, CompiledStep] = {}
        self._last: CompiledStep | None = None
        self._under_way: collections.deque[Hashable] = collections.deque(maxlen=_MOST_FRAMES)
        self._steps_seconds: collections.deque[float] = collections.deque(maxlen=KEPT_STEPS)
        self._started: float | None = None
        self._leave_out = False  # the step under way
        self._leave_out_next = False

    @property
    def graphs(self) -> list[CompiledStep]:
        """The frames of :attr:`in_step` as they were compiled last; before the first step, all."""
        return [self._compiled[frame] for frame in self.in_step or self._compiled]

    def before(self, frame: Hashable) -> list[CompiledStep]:
        """The runs of frames that come before the last one of a frame in a step.

        Of a frame that no step ran yet those that have begun count.
        """
        order = [*self.in_step, *self._under_way]
        if frame in self.in_step:
            order = order[: len(self.in_step) - 1 - self.in_step[::-1].index(frame)]
        return [self._compiled[one] for one in order if one in self._compiled]

    def compiled(self, step: CompiledStep, phase: Phase, timeline: Timeline) -> None:
        """Keep a graph's timeline. A forward begins anew: its frame's steps are timed from now."""
        step.timelines[phase] = timeline
        self.interrupted()
        if phase is not Phase.FORWARD:
            return
        if self._last is None or self._last.frame != step.frame:
            self._steps_seconds.clear()
            self._started = None
        if step.frame not in self._compiled:  # it goes on where the last one stopped
            self._under_way.extendleft(reversed(self.in_step))
        self._compiled[step.frame] = self._last = step
        # The forward is compiled before its first start: that whole step is still to come.
        self._leave_out_next = True

    def interrupted(self) -> None:
        """Something is being compiled: the step under way is no step like others."""
        self._leave_out = True

    def forward_started(self, frame: Hashable) -> None:
        """A frame's compiled forward begins now."""
        self._under_way.append(frame)
        if self._last is None or self._last.frame != frame:
            return  # each frame starts once a step: one of them is enough
        self.in_step = tuple(self._under_way)
        self._under_way.clear()
        now = time.perf_counter()
        if self._started is not None and not self._leave_out:
            self._steps_seconds.append(now - self._started)
        self._started = now
        self._leave_out, self._leave_out_next = self._leave_out_next, False

    @property
    def steps(self) -> int:
        """How many steps :attr:`step_seconds` rests on."""
        return len(self._steps_seconds)

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps, the first after each compilation left out."""
        return statistics.median(self._steps_seconds) if self._steps_seconds else None


def timed(function: Callable[..., Any], observed: Observed, frame: Hashable) -> Callable[..., Any]:
    """The compiled function of a frame that is trained, saying when it starts.

    It goes around everything that AOTAutograd and Inductor made: Inductor looks at the type of
    what compiles one graph (for CUDA graphs), and a function put around that would hide it.
    """

    def stamped(*args: Any, **kwargs: Any) -> Any:
        observed.forward_started(frame)
        return function(*args, **kwargs)

    # What AOTAutograd left on it for Dynamo. (Not ``functools.wraps``: Dynamo would look
    # through ``__wrapped__``.)
    vars(stamped).update(getattr(function, "__dict__", {}))
    return stamped
