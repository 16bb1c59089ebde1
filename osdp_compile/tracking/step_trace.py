"""Step trace: the times of a few training steps, call by call.

A few steps after a compilation, the calls of operators within the compiled graphs are timed: the
starts of collectives, the waits, torch's own kernels. Code that Inductor generated calls no
operator; it runs between them. All other steps run without any of this. Ranks count the same
steps, so they trace the same ones, and none of them is late for it.

CPU only: on a GPU a call returns before its kernel runs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.optim import Optimizer

from osdp_compile import _torch
from osdp_compile.calibration.evidence import MeasuredGraph, MeasuredStep, middle_half
from osdp_compile.optim.step_hooks import after_steps, before_steps
from osdp_compile.tracking.compiled_calls import around_backward, operator_name
from passes.simulate.skeleton import is_computing
from passes.types.context import Phase

log = logging.getLogger("osdp_compile")

#: Steps that are timed before the first traced step, and traced steps.
WARM_STEPS, TRACED_STEPS = 3, 8
#: The slowest step of the middle half over its fastest. Above it, the machine is not steady.
_MOST_SPREAD = 1.3
#: Traced steps after which tracing ends though the machine is not steady.
_MOST_STEPS = 32


class CallTimes(_torch.autograd.TorchDispatchMode):
    """The operators that one compiled graph calls, with the times of each call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, float, float]] = []
        self.begin = self.end = 0.0  # 0: not reached

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        begin = time.perf_counter()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.calls.append((func, begin, time.perf_counter()))

    def start(self) -> None:
        """Time all calls from here on; the second backward of a retained graph is not timed."""
        if not self.begin:
            self.__enter__()  # type: ignore[no-untyped-call]
            self.begin = time.perf_counter()

    def stop(self) -> None:
        """End it, also where autograd ended it because of an error in a backward."""
        if self.begin and not self.end:
            self.end = time.perf_counter()
            _torch.autograd.leave_mode(self)

    def along(self, skeleton: fx.Graph) -> MeasuredGraph | None:
        """The times along a skeleton; None: other collectives and waits were called."""
        called = [node for node in skeleton.nodes if node.op == "call_function"]
        points = [operator_name(node.target) for node in called if not is_computing(node)]
        seconds: list[float] = []
        found: list[str] = []
        own, last = 0.0, self.begin
        for func, begin, end in self.calls:
            name = operator_name(func)
            if name in points:
                found.append(name)
                seconds += [own, begin - last - own, end - begin]
                own, last = 0.0, end
            elif func.namespace == "aten":
                own += end - begin
        seconds += [own, self.end - last - own]
        return MeasuredGraph(skeleton, tuple(seconds)) if found == points else None


@dataclasses.dataclass
class _Trace:
    """One step while it runs."""

    begin: float
    forward: CallTimes
    backward: CallTimes
    optimizer_seconds: float = 0.0


class StepTraces:
    """Traced steps of one model.

    ``holds``: whether an optimizer steps the model's parameters.
    ``done``: called with the steps, once they are steady.
    """

    def __init__(
        self,
        holds: Callable[[Optimizer], bool],
        done: Callable[[Sequence[MeasuredStep]], None],
    ) -> None:
        self._holds, self._done = holds, done
        #: The last finished steps.
        self.steps: list[MeasuredStep] = []
        self._left = _MOST_STEPS
        self._open: _Trace | None = None
        self._stepping = 0.0
        self._hooks: list[Any] = []

    @property
    def is_over(self) -> bool:
        """Whether no further step is traced."""
        return self._left == 0

    def restart(self) -> None:
        """Forget all steps: the graphs are compiled again."""
        self._stop()
        self.steps, self._left = [], _MOST_STEPS

    def interrupted(self) -> None:
        """Leave out the step under way: something is compiled in it."""
        self._open = None

    def next_step(self, now: float, skeletons: Mapping[Phase, fx.Graph]) -> None:
        """A step begins: keep the one before, and stop once there are enough."""
        trace, self._open = self._open, None
        if trace is None:
            return
        trace.backward.stop()
        step = _measured(trace, now, skeletons)
        if step is not None:
            self.steps = [*self.steps[-TRACED_STEPS + 1 :], step]
        if len(self.steps) == TRACED_STEPS:
            kept = [one.step_seconds for one in middle_half(self.steps)]
            if max(kept) <= _MOST_SPREAD * min(kept):
                self._left = 0
                self._done(self.steps)
        if self.is_over:
            if not self.steps:
                log.info(
                    "no step is measured part by part, and nothing is learned: the steps ran other "
                    "graphs, or their collectives and waits in another order than the plan's"
                )
            self._stop()

    def forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run and trace a compiled forward. Its backward is traced when it runs."""
        if not self._hooks:
            self._hooks = [
                before_steps(self._optimizer_begins),
                after_steps(self._optimizer_ends),
            ]
        self._left -= 1
        trace = self._open = _Trace(time.perf_counter(), CallTimes(), CallTimes())
        trace.forward.start()
        try:
            outputs = function(*args, **kwargs)
        finally:
            trace.forward.stop()
        around_backward(outputs, trace.backward.start, trace.backward.stop)
        return outputs

    def _optimizer_begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping = time.perf_counter() if self._holds(optimizer) else 0.0

    def _optimizer_ends(self, *_: Any) -> None:
        if self._open is not None and self._stepping:
            self._open.optimizer_seconds += time.perf_counter() - self._stepping

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open = [], None


def _measured(
    trace: _Trace, now: float, skeletons: Mapping[Phase, fx.Graph]
) -> MeasuredStep | None:
    """A step's times; None: it did not run its two graphs once each."""
    if not trace.backward.end or set(skeletons) != {Phase.FORWARD, Phase.BACKWARD}:
        return None
    forward = trace.forward.along(skeletons[Phase.FORWARD])
    backward = trace.backward.along(skeletons[Phase.BACKWARD])
    if forward is None or backward is None:
        return None
    inside = forward.seconds + backward.seconds + trace.optimizer_seconds
    loop_seconds = max(0.0, now - trace.begin - inside)
    return MeasuredStep(1, forward, backward, trace.optimizer_seconds, loop_seconds)
