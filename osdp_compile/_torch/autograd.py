"""Autograd: what it holds, its backwards, and the modes of a thread."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch import Tensor

# 2.11.0 to 2.15.0: the node of an autograd.Function in the backward.
from torch.autograd.function import BackwardCFunction

# 2.11.0 to 2.15.0: a mode that sees the operators that compiled code calls; the innermost one of
# a thread.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _push_mode

__all__ = [
    "CUSTOM_BACKWARDS",
    "TorchDispatchMode",
    "hooks_saved_tensors",
    "is_profiled",
    "is_saved",
    "leave_mode",
    "take_gradient",
    "version_of",
]

#: Code objects on the stack during the backward of an autograd.Function.
# 2.11.0 to 2.15.0; in 2.15 autograd calls ``apply_boxed`` for boxed gradients.
CUSTOM_BACKWARDS: tuple[CodeType, ...] = tuple(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
)


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave a mode. After an error in a backward, autograd has taken it from the stack."""
    if _get_current_dispatch_mode() is not mode:
        _push_mode(mode)
    mode.__exit__(None, None, None)


def is_saved(tensor: Tensor) -> bool:
    """Whether autograd holds the tensor: it saved it, or will accumulate its gradient."""
    # 2.11.0 to 2.15.0: C++ references; all Python references count as one.
    counted: Any = tensor
    return bool(counted._use_count() > 1)


def version_of(tensor: Tensor) -> int:
    """The number of writes into a tensor, its views and what it was detached from."""
    return tensor._version  # 2.11.0, 2.13.0, 2.15.0


def is_profiled() -> bool:
    """Whether a profiler records this thread."""
    # 2.11.0 to 2.15.0
    enabled: bool = torch._C._autograd._profiler_enabled()
    return enabled


def hooks_saved_tensors() -> bool:
    """Whether hooks pack the tensors that autograd saves now."""
    # 2.11.0 to 2.15.0: AOTAutograd asks this too; True: also while tracing.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None


def take_gradient(tensor: Tensor) -> Tensor | None:
    """The ``grad`` of a tensor itself, past its class's ``__torch_function__``; it loses it."""
    with torch._C.DisableTorchFunctionSubclass():  # 2.13.0
        gradient, tensor.grad = tensor.grad, None
    return gradient
