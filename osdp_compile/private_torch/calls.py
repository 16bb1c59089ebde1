"""Calls on the stack: frames and code objects of modules, compiled functions and Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

# 2.11.0 to 2.15.0: files of compiled functions and of Dynamo's compiler.
from torch._dynamo import convert_frame, eval_frame

# skip_code, 2.13.0: Dynamo does not compile the function by itself, but traces it inline.
# _TorchDynamoContext, 2.11.0, 2.13.0, 2.15.0: its __call__ holds torch.compile's function wrapper.
from torch._dynamo.eval_frame import _TorchDynamoContext, skip_code

# 2.11.0 to 2.15.0: the node of an autograd.Function in the backward.
from torch.autograd.function import BackwardCFunction

from osdp_compile.live_objects import closed_over

#: Torch's own names; others use them as they are.
__all__ = ["skip_code"]


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
#: Code objects on the stack during the backward of an autograd.Function.
# 2.11.0 to 2.15.0; in 2.15 autograd calls ``apply_boxed`` for boxed gradients.
CUSTOM_BACKWARDS: tuple[CodeType, ...] = tuple(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
)

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


def forget_compiled(code: CodeType) -> None:
    """Make Dynamo compile a code again at its next call. It must not run or be compiled now."""
    eval_frame.remove_from_cache(code)
