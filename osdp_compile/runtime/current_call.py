"""The current call: the user's call in which Dynamo compiles a frame now.

A backend gets one graph. After a graph break, in a submodule with a compiled frame of its own, or
in blocks compiled one by one, the graph is only a part of a step. The Python stack shows the whole
step: the call of the outermost module that holds the graph's parameters, or of the outermost
compiled function.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.live_objects import closed_over


@dataclasses.dataclass(frozen=True)
class Call:
    """A running call.

    ``target``: the called module or function. ``modules``: the target, if it is a module, and the
    modules in whose calls Dynamo is now, the outermost first. ``is_whole``: the frame being
    compiled is the target's own, so no other code of the step runs outside of it.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: tuple[nn.Module, ...]
    is_whole: bool

    def outermost(self, module: nn.Module) -> nn.Module:
        """The outermost of ``modules`` that contains ``module``; else ``module`` itself."""
        for one in self.modules:
            if any(part is module for part in one.modules()):
                return one
        return module


def current_call(holds: Callable[[nn.Module], bool]) -> Call | None:
    """The outermost call of a compiled function, or of a module with ``holds(module)``.

    None: no such call, as for an export, where Dynamo compiles a frame alone.
    """
    frames = list(stack())[::-1]  # the outermost first
    modules: list[nn.Module] = []
    first: int | None = None
    for index, frame in enumerate(frames):
        called = _torch.dynamo.called_module(frame)
        if called is not None:
            module = getattr(called, "_orig_mod", called)
            if holds(module):
                modules.append(module)
                first = index if first is None else first
        elif first is None and _torch.dynamo.called_function(frame) is not None:
            first = index
    if first is None:
        return None
    frame = frames[first]
    module = _torch.dynamo.called_module(frame)
    target = module if module is not None else _torch.dynamo.called_function(frame)
    assert target is not None
    return Call(
        target,
        tuple(frame.f_locals["args"]),
        dict(frame.f_locals["kwargs"]),
        tuple(dict.fromkeys(modules)),
        is_whole=not any(map(_torch.dynamo.is_users_code, _until_dynamo(frames[first:]))),
    )


def modules_being_called() -> Iterator[nn.Module]:
    """The modules on the call stack, the innermost first, up to the innermost compiled callable."""
    for frame in stack():
        called = _torch.dynamo.called_module(frame)
        if called is not None:
            yield called
        elif _torch.dynamo.called_function(frame) is not None:
            return


def interrupted_call(gm: fx.GraphModule, inputs: Sequence[Any]) -> Call | None:
    """The current call, if the graph is only a part of it; None: the graph is the whole step."""
    parameters = {id(one) for one in inputs if isinstance(one, nn.Parameter)}
    call = current_call(holding(parameters))
    if call is None or (call.is_whole and not _torch.dynamo.ends_at_graph_break(gm)):
        return None
    return call


def with_whole_models(
    roots: Sequence[tuple[str, nn.Module]], call: Call
) -> list[tuple[str, nn.Module]]:
    """The whole modules of a step, from the roots that one of its graphs reads.

    Each root becomes the outermost module of the call that contains it. A function may call other
    models after a graph break: models with trained parameters that it refers to are roots too.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for label, root in roots:
        whole = call.outermost(root)
        found.setdefault(id(whole), (label, whole))
    if not isinstance(call.target, nn.Module):
        held = [(name, one) for name, one in call.kwargs.items() if isinstance(one, nn.Module)]
        held += [("model", one) for one in call.args if isinstance(one, nn.Module)]
        for label, module in [*held, *referred_to(call.target)]:
            if _has_plain_trained(module) and not any(
                module is part for _, root in found.values() for part in root.modules()
            ):
                found.setdefault(id(module), (label, module))
    outer = [
        one
        for one in found.values()
        if not any(
            one[1] is not other and any(one[1] is part for part in other.modules())
            for _, other in found.values()
        )
    ]
    if len(outer) == 1:
        return [("", outer[0][1])]
    labels = [label for label, _ in outer]
    return [
        (label if label and labels.count(label) == 1 else f"{label or 'model'}{index}", module)
        for index, (label, module) in enumerate(outer)
    ]


def _has_plain_trained(module: nn.Module) -> bool:
    return any(one.requires_grad and not isinstance(one, DTensor) for one in module.parameters())


def referred_to(function: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a function's closure, globals and ``__self__``, with names."""
    named: list[tuple[str, Any]] = [("model", getattr(function, "__self__", None))]
    function = getattr(function, "__func__", function)
    code: CodeType | None = getattr(function, "__code__", None)
    if code is not None:
        named += closed_over(function).items()
        scope = function.__globals__
        named += [(name, scope[name]) for name in code.co_names if name in scope]
    for name, value in named:
        value = getattr(value, "_orig_mod", value) if isinstance(value, nn.Module) else value
        if isinstance(value, nn.Module):
            yield name, value


def stack() -> Iterator[FrameType]:
    """The caller's frame and the frames above it, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _until_dynamo(frames: Sequence[FrameType]) -> Iterator[FrameType]:
    """The frames up to the first one of Dynamo's compiler."""
    for frame in frames:
        if _torch.dynamo.is_dynamos_compiler(frame):
            return
        yield frame


def holding(parameters: Collection[int]) -> Callable[[nn.Module], bool]:
    """A predicate of modules: the module holds one of these parameters, given by ``id``."""
    known: dict[int, bool] = {}

    def holds(module: nn.Module) -> bool:
        if id(module) not in known:
            known[id(module)] = any(id(one) in parameters for one in module.parameters())
        return known[id(module)]

    return holds
