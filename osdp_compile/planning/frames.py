"""Frames: trace a step with graph breaks as a whole, before planning.

Planning begins at the step's first graph that needs gradients. If this graph is not the whole step,
the current call is repeated from its beginning on fake tensors. Every graph that Dynamo makes is
captured, and runs on fake tensors to lead to the next graph. If the model's own code needs values,
which fake tensors do not have, the call is repeated on the real tensors. The model does not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from osdp_compile import _torch
from osdp_compile.log_lines import OF_ALL_RANKS
from osdp_compile.model.model_parameters import ModelParameter, model_parameters
from osdp_compile.planning.capture import NeedsNoGradients
from osdp_compile.planning.fake_model import fake_models
from osdp_compile.planning.planner_inputs import captured_step
from osdp_compile.runtime.current_call import Call, stack
from passes.capture.join_frames import FrameRun, join_frames
from passes.graph.captured import Captured
from passes.graph.fx_utils import output_node
from passes.pipeline import Pass
from passes.types.context import Context

log = logging.getLogger("osdp_compile")


class _BackwardBegins(BaseException):
    """Ends a trace at the start of the backward in the user's function."""


def captured_frames(
    call: Call,
    roots: Sequence[tuple[str, nn.Module]],
    ctx: Context,
    passes: Sequence[Pass],
    device: torch.device | None = None,
) -> Captured | None:
    """The step of a call as one captured step; None: none of its graphs needs gradients.

    ``roots``: the modules that own the parameters, as for :func:`model_parameters`.
    ``device``: for the trace of a model without memory; None: the model has memory.
    """
    runs: list[FrameRun] = []
    ways: list[Callable[..., None]] = [functools.partial(_on_fake_tensors, device)]
    if device is None:
        ways.append(_on_real_tensors)
    for traced in ways:
        collector = _Collector(ctx, passes)
        try:
            with _same_random_numbers(), torch.enable_grad():
                traced(call, roots, collector)
        except _BackwardBegins:
            return _joined(collector.runs, ctx)
        except Exception as error:  # from the model's own code, which needs values
            log.debug("tracing the whole step: %r", error)
            if len(collector.runs) > len(runs):
                runs = collector.runs
        else:
            return _joined(collector.runs, ctx)
    if runs:
        log.warning(
            "the step could not be traced to its end before it was planned: parameters that only "
            "later graphs read are replicated, and their activations are not in the prediction",
            extra=OF_ALL_RANKS,
        )
    return _joined(runs, ctx)


def is_collecting() -> bool:
    """Whether a step is being traced: capture graphs instead of compiling them."""
    return bool(_collectors)


def collected(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Capture one graph of the step being traced; returns a callable that runs it."""
    return _collectors[-1].compile(gm, inputs)


def _joined(runs: Sequence[FrameRun], ctx: Context) -> Captured | None:
    if not runs:
        return None
    read = {name for run in runs for name in run.names.values()}
    unread = frozenset(one.name for one in ctx.parameters) - read
    return dataclasses.replace(join_frames(runs), unread=unread)


def unseen_bytes_of(captured: Captured, ctx: Context) -> int:
    """Gradient bytes that no graph shows: of parameters read by eager code, and between frames."""
    unread = [one.gradient_bytes for one in ctx.parameters if one.name in captured.unread]
    return sum(unread) + captured.border_bytes


def _on_fake_tensors(
    device: torch.device | None,
    call: Call,
    roots: Sequence[tuple[str, nn.Module]],
    collector: _Collector,
) -> None:
    modules = [module for _, module in roots]
    own = next(one.device for module in modules for one in module.parameters())
    with fake_models(modules, (call.args, call.kwargs), device or own) as (args, kwargs):
        _call(call, roots, collector, args, kwargs)


def _on_real_tensors(
    call: Call, roots: Sequence[tuple[str, nn.Module]], collector: _Collector
) -> None:
    buffers = [buffer for _, module in roots for buffer in module.buffers()]
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        _call(call, roots, collector, call.args, call.kwargs)
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _call(
    call: Call,
    roots: Sequence[tuple[str, nn.Module]],
    collector: _Collector,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    collector.entries = model_parameters(roots)
    under_way = (
        _torch.dynamo.code_being_compiled() if _torch.dynamo.current_frame() is not None else None
    )
    target = call.target
    if not isinstance(target, nn.Module):  # its compiled wrapper is not on the stack
        target = torch.compile(target, backend=collector.compile)
    _collectors.append(collector)
    try:
        target(*args, **kwargs)
    finally:
        _collectors.pop()
        collector.let_go(under_way)


class _Collector:
    """Captures the graphs of a step as Dynamo makes them, and records their runs."""

    def __init__(self, ctx: Context, passes: Sequence[Pass]) -> None:
        self.ctx, self.passes = ctx, passes
        self.entries: Sequence[ModelParameter] = ()
        self.runs: list[FrameRun] = []
        self._numbers: dict[int, tuple[Tensor, int]] = {}  # tensors kept: ids stay unique
        self._codes: set[CodeType] = set()
        self._ended = False

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._codes.add(_torch.dynamo.code_being_compiled())
        needed = any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
        if not (needed and torch.is_grad_enabled()):
            return gm
        try:
            captured = captured_step(gm, inputs, self.entries, self.ctx, self.passes)
        except NeedsNoGradients:
            return gm
        first = self._names(inputs)

        def run(*args: Any) -> Any:
            results = gm(*args)
            if self._ended:  # a running frame, which Dynamo cannot forget
                return results
            names = self._names(args)
            own = {first[index]: name for index, name in names.items() if index in first}
            self.runs.append(self._run(captured, own, args, results))
            for one in results:
                if isinstance(one, Tensor) and one.requires_grad and not one.is_leaf:
                    one.register_hook(_stop)
            return results

        return run

    def let_go(self, under_way: CodeType | None) -> None:
        """Drop the tensors, and make Dynamo compile the frames of the trace again.

        The guards of a frame without parameters hold in training too, so Dynamo would run the
        code of the trace there. Keeps frames on the stack and ``under_way``, which Dynamo compiles.
        """
        self.entries = ()
        self._numbers.clear()
        self._ended = True
        busy = {_place(frame.f_code) for frame in stack()}
        for code in self._codes:
            if code is not under_way and _place(code) not in busy:
                _torch.dynamo.forget_compiled(code)
        self._codes.clear()

    def _names(self, inputs: Sequence[Any]) -> dict[int, str]:
        by_id = {id(entry.parameter): entry.name for entry in self.entries}
        return {i: by_id[id(value)] for i, value in enumerate(inputs) if id(value) in by_id}

    def _run(
        self, captured: Captured, names: dict[str, str], args: Sequence[Any], results: Sequence[Any]
    ) -> FrameRun:
        taken = [self._number(one) for one in args]
        given = [self._number(one) for one in results]
        forward, backward = captured.forward.graph, captured.backward.graph
        inputs, outputs, tangents, gradients = {}, {}, {}, {}
        for node in forward.find_nodes(op="placeholder"):
            index = _torch.aot_autograd.input_index(node)
            if index is not None:
                inputs[node.name] = taken[index]
        for position, said in enumerate(output_node(forward).meta.get("desc") or ()):
            index = _torch.aot_autograd.result_index(said)
            if index is not None:
                outputs[position] = given[index]
        for node in backward.find_nodes(op="placeholder"):
            index = _torch.aot_autograd.tangent_result_index(node.meta.get("desc"))
            if index is not None:
                tangents[node.name] = given[index]
        for position, said in enumerate(output_node(backward).meta.get("desc") or ()):
            index = _torch.aot_autograd.gradient_input_index(said)
            if index is not None:
                gradients[position] = taken[index]
        return FrameRun(captured, names, inputs, outputs, tangents, gradients)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = value, len(self._numbers)
        return self._numbers[id(value)][1]


def _place(code: CodeType) -> tuple[str, int, str]:
    """The source of a code object; Dynamo's code has the source of the original function."""
    return code.co_filename, code.co_firstlineno, code.co_name


def _stop(gradient: Tensor) -> None:
    raise _BackwardBegins


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Context: restore all random generators on exit."""
    plain, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(of_numpy)


#: Collector of the step being traced, if any; Dynamo calls the backend again during the trace.
_collectors: list[_Collector] = []
