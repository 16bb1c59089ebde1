"""Dynamo: the frames that it compiles, the sources of their inputs, its errors and restarts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import fx, nn

# 2.11.0 to 2.15.0: files of compiled functions and of Dynamo's compiler.
from torch._dynamo import convert_frame, eval_frame

# skip_code, 2.13.0: Dynamo does not compile the function by itself, but traces it inline.
# _TorchDynamoContext, 2.11.0, 2.13.0, 2.15.0: its __call__ holds torch.compile's function wrapper.
from torch._dynamo.eval_frame import _TorchDynamoContext, skip_code

# 2.11.0 to 2.15.0: Dynamo lets a backend raise these. The restart makes it trace the frame again.
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis

# 2.11.0 to 2.15.0: the frame being traced; the floats that Dynamo makes constants when it
# traces a frame again.
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState

# 2.11.0 to 2.15.0: see :func:`recompile_reason`.
from torch._dynamo.utils import get_metrics_context

# CompileContext, CompileId, 2.11.0, 2.13.0, 2.15.0: the frame that Dynamo compiles.
# TracingContext, 2.13.0: the fake tensor mode of the graph being compiled.
from torch._guards import CompileContext, CompileId, TracingContext

from osdp_compile.live_objects import closed_over

__all__ = [
    "COMPILED_CALLS",
    "MODULE_CALLS",
    "CompileId",
    "RestartTracing",
    "backend_of_compiled",
    "called_function",
    "called_module",
    "code_being_compiled",
    "compile_id",
    "constant_floats",
    "copy_source",
    "current_frame",
    "ends_at_graph_break",
    "evaluate_prefixes",
    "forget_compiled",
    "is_dynamos_compiler",
    "is_users_code",
    "original_function",
    "raise_to_user",
    "recompile_reason",
    "restart_tracing",
    "restart_with_constants",
    "skip_code",
    "source_chain",
    "whole_stand_in",
]


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_within(constant)


#: Code objects on the stack during the call of a module.
# 2.11.0 to 2.15.0
MODULE_CALLS: tuple[CodeType, ...] = (
    nn.Module._wrapped_call_impl.__code__,
    nn.Module._call_impl.__code__,
)


#: Code objects on the stack during the call of a torch.compile result for a function.
COMPILED_CALLS: tuple[CodeType, ...] = tuple(_codes_within(_TorchDynamoContext.__call__.__code__))


def restart_tracing() -> NoReturn:
    """From within a backend: make Dynamo trace the frame again from its start.

    Dynamo keeps a log of its speculations and refuses a trace that differs from it. This function
    clears the log, because the model has changed on purpose.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: the model was sharded")


#: AOTAutograd raises this to make Dynamo trace the frame again with floats as constants.
RestartTracing = TensorifyScalarRestartAnalysis


def constant_floats() -> list[str]:
    """The symbols of floats that become constants when Dynamo traces this frame again."""
    return sorted(TensorifyState.force_specializations)


def restart_with_constants(symbols: Sequence[str]) -> NoReturn:
    """From within a backend: make Dynamo trace the frame again with these floats as constants."""
    for symbol in symbols:
        TensorifyState.specialize(symbol)
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: rank 0 traces the frame again")


def raise_to_user(error: Exception, mixin: type | None = None) -> NoReturn:
    """Raise an error from a backend so that the user gets its own type.

    Dynamo wraps errors of a backend into BackendCompilerFailed, except its own ShortenTraceback.
    So the raised error is of a subclass of both. Its traceback begins at the backend, not in Dynamo
    (the whole traceback with TORCHDYNAMO_VERBOSE=1).

    ``mixin``: another base of the subclass, for errors that a user can act on. These have no
    traceback and no cause.
    """
    kind = type(error)
    if isinstance(error, ShortenTraceback):
        raise error
    said, reduced = str(error), error.__reduce__()
    own = {
        "__module__": kind.__module__,
        "__str__": lambda self: said,  # Dynamo adds advice about its traceback to ``args``
        "__reduce__": lambda self: reduced,
    }
    bases = (kind, ShortenTraceback) if mixin is None else (mixin, kind, ShortenTraceback)
    both: Any = type(kind.__name__, bases, own)
    raised = both.__new__(both)
    # Sets the attributes that Dynamo reads when it suppresses errors; newer versions have more.
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=sys._getframe(1))
    raised.__dict__.update(error.__dict__)
    if mixin is not None:
        raise raised from None
    raise raised.with_traceback(error.__traceback__) from error.__cause__


# 2.11.0 to 2.15.0: the code that calls a module; the file of torch.compile's wrapper
# function, which calls ``fn(*args, **kwargs)``; the file in which Dynamo compiles a frame.
_CALLS_MODULE = nn.Module._call_impl.__code__


_COMPILED_CALLABLES = eval_frame.__file__


_COMPILER = convert_frame.__file__


_CALLS = (torch.nn.modules.module.__file__, _COMPILED_CALLABLES)


def called_module(frame: FrameType) -> nn.Module | None:
    """The module that a frame calls; None: not torch's frame for a module call."""
    return frame.f_locals.get("self") if frame.f_code is _CALLS_MODULE else None


def called_function(frame: FrameType) -> Callable[..., Any] | None:
    """The function given to ``torch.compile``, if the frame is of its wrapper; else None."""
    if frame.f_code.co_filename != _COMPILED_CALLABLES:
        return None
    found = frame.f_locals
    return found["fn"] if {"fn", "args", "kwargs"} <= found.keys() else None


def backend_of_compiled(compiled: Any) -> Any:
    """The backend of a compiled module or function; None: not compiled."""
    # 2.11.0 to 2.15.0: attributes of OptimizedModule and of a compiled function.
    context = vars(compiled).get("dynamo_ctx") if isinstance(compiled, nn.Module) else None
    if context is None and "_torchdynamo_orig_callable" in getattr(compiled, "__dict__", {}):
        held = closed_over(compiled).values()
        context = next((one for one in held if isinstance(one, eval_frame.OptimizeContext)), None)
    if not isinstance(context, eval_frame.OptimizeContext):
        return None
    found: Any = eval_frame.innermost_backend(context.callback)  # type: ignore[arg-type]
    return getattr(found, "compiler_fn", found)


def original_function(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ``torch.compile`` compiled."""
    original: Callable[..., Any] = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return original


def is_dynamos_compiler(frame: FrameType) -> bool:
    """Whether a frame belongs to Dynamo's frame compiler."""
    return frame.f_code.co_filename == _COMPILER


def is_users_code(frame: FrameType) -> bool:
    """Whether a frame of a running call is not part of torch's call machinery."""
    return frame.f_code.co_filename not in _CALLS


def ends_at_graph_break(gm: fx.GraphModule) -> bool:
    """Whether this graph ends at a graph break."""
    # 2.11.0 to 2.15.0: the reason for the end of a graph.
    return bool(gm.compile_subgraph_reason.graph_break)  # type: ignore[union-attr]


def current_frame() -> int | None:
    """The id of the frame being compiled; the same for a recompilation; None outside Dynamo."""
    compiling = CompileContext.current_compile_id()
    return compiling.frame_id if compiling is not None else None


def compile_id() -> CompileId | None:
    """The compilation under way, as torch's logs name it; None outside Dynamo."""
    return CompileContext.current_compile_id()


def recompile_reason() -> str | None:
    """The reason for the recompilation of this frame; None: first compilation."""
    # 2.11.0 to 2.15.0: Dynamo's record of the current compilation.
    reason = get_metrics_context()._metrics.get("recompile_reason")
    return None if reason is None else str(reason)


def source_chain(placeholder: fx.Node) -> list[str]:
    """The expressions of a graph input's source, outermost first: ``L['m']``, ``L['m']._mod…``."""
    source = getattr(placeholder, "_dynamo_source", None)
    names: list[str] = []
    while source is not None:
        name = source.name() if callable(source.name) else source.name
        names.append(name)
        source = getattr(source, "base", None)
    return names[::-1]


def code_being_compiled() -> CodeType:
    """From within a backend: the code of the frame that Dynamo compiles."""
    # 2.11.0 to 2.15.0
    code: CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    return code


def forget_compiled(code: CodeType) -> None:
    """Make Dynamo compile a code again at its next call. It must not run or be compiled now."""
    eval_frame.remove_from_cache(code)


def copy_source(placeholder: fx.Node, copied: fx.Node) -> None:
    """Give a copy of a graph input the input's Dynamo source."""
    copied._dynamo_source = placeholder._dynamo_source  # type: ignore[attr-defined]


def evaluate_prefixes(placeholder: fx.Node) -> list[tuple[str, Any]]:
    """(expression, object) along a graph input's source in the traced frame, outermost first."""
    output = InstructionTranslator.current_tx().output
    scope = {"L": output.local_scope, "G": output.global_scope}
    found = []
    for name in source_chain(placeholder):
        try:
            found.append((name, eval(name, dict(output.global_scope), scope)))
        except Exception:  # uses Dynamo's own helpers; a longer prefix may evaluate
            continue
    return found


def whole_stand_in(parameter: nn.Parameter, shape: Sequence[int]) -> nn.Parameter:
    """A whole fake parameter in place of a DTensor parameter of the graph being compiled."""
    mode = TracingContext.get().fake_mode
    assert mode is not None  # a backend is called with one
    with mode:
        empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
