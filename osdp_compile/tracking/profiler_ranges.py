"""Profiler ranges: names for a step's phases, collectives and waits in ``torch.profiler`` traces.

While a profiler records, the graphs of a training step run under a mode that sees their calls of
operators. It gives each start of a collective the label that the simulated trace has for it
(``passes/simulate/chrome_trace.py``), such as ``gather blocks.0.up.weight``, and each wait
``wait: gather blocks.0.up.weight``. The two traces can then be laid one above the other. Without a
profiler the graphs run without the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import fx
from torch.profiler import record_function

from osdp_compile import _torch
from osdp_compile.tracking.compiled_calls import around_backward, operator_name
from passes.graph.fx_utils import WAIT, is_collective
from passes.simulate.timeline import COMPUTE, Timeline
from passes.types.context import Phase


class Range(NamedTuple):
    """``operator``: its name, equal for its variant in place."""

    operator: str
    label: str


def ranges_of(graph: fx.Graph, timeline: Timeline) -> tuple[Range, ...]:
    """The ranges of a lowered graph's collectives and waits, in its order.

    A collective that takes no time has no event in the timeline. Its label is its node's name.
    """
    labels = {one.name: one.label for one in timeline.events if one.stream != COMPUTE}
    found = []
    for node in graph.nodes:
        started = node.args[0] if node.target is WAIT else None
        if is_collective(node):
            label = labels.setdefault(node.name, node.name)
            found.append(Range(operator_name(node.target), label))
        elif isinstance(started, fx.Node) and is_collective(started):
            found.append(Range(operator_name(node.target), f"wait: {labels[started.name]}"))
    return tuple(found)


class _Ranges(_torch.autograd.TorchDispatchMode):
    """Gives the calls of one graph their ranges. The first call out of order ends them."""

    def __init__(self, phase: Phase, ranges: Sequence[Range]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = list(reversed(ranges))
        self._operators = {one.operator for one in ranges}
        self._phase: AbstractContextManager[Any] = record_function(f"osdp: {phase.value}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        label = self._label(operator_name(func))
        with nullcontext() if label is None else record_function(label):
            return func(*args, **(kwargs or {}))

    def _label(self, name: str) -> str | None:
        """The label of a call; None: it has no range."""
        if name not in self._operators or not self._left:
            return None
        expected = self._left.pop()
        if expected.operator == name:
            return expected.label
        self._left.clear()
        return None

    def start(self) -> None:
        self._phase.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End it, also where autograd ended it because of an error in a backward."""
        _torch.autograd.leave_mode(self)
        self._phase.__exit__(None, None, None)


class ProfilerRanges:
    """The ranges of a compiled step by phase, in the order of its graphs."""

    def __init__(self) -> None:
        self.of: dict[Phase, Sequence[Range]] = {}
        self._open: list[_Ranges] = []

    def forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a compiled forward with its ranges; its backward gets its own when it runs."""
        self._stop()  # after an error in a backward
        self._start(Phase.FORWARD)
        try:
            outputs = function(*args, **kwargs)
        finally:
            self._stop()
        around_backward(outputs, lambda: self._start(Phase.BACKWARD), self._stop)
        return outputs

    def _start(self, phase: Phase) -> None:
        if _torch.autograd.is_profiled():
            self._open.append(_Ranges(phase, self.of.get(phase, ())))
            self._open[-1].start()

    def _stop(self) -> None:
        while self._open:
            self._open.pop().stop()
