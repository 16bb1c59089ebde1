"""Tensors: fake ones, leaves of containers, dispatch modes, and memory of a thread or process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# 2.11.0 to 2.15.0: tensors with a shape and a device, without memory.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# 2.11.0 to 2.15.0: a mode that sees the operators that compiled code calls; the innermost one of
# a thread.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _push_mode,
)

# 2.11.0 to 2.15.0: leaves of nested containers and dataclasses such as model outputs.
from torch.utils._pytree import tree_leaves, tree_map_only

#: Torch's own names; others use them as they are.
__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves", "tree_map_only"]


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave a mode. After an error in a backward, autograd has taken it from the stack."""
    if _get_current_dispatch_mode() is not mode:
        _push_mode(mode)
    mode.__exit__(None, None, None)


def is_profiled() -> bool:
    """Whether a profiler records this thread."""
    # 2.11.0 to 2.15.0
    enabled: bool = torch._C._autograd._profiler_enabled()
    return enabled


def allocations_of(run: Callable[[], object]) -> list[int]:
    """This thread's CPU allocations in a function, in bytes; frees are negative.

    What the function returns is not freed.

    Raises:
        RuntimeError: a profiler records this thread.
    """
    # 2.11.0 to 2.15.0: the profiler before Kineto, which writes no lines of its own to stderr.
    state, config = torch._C._profiler.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()
    torch._C._autograd._enable_profiler_legacy(
        torch._C._profiler.ProfilerConfig(state, False, True, False, False, False, config)
    )
    try:
        result = run()  # noqa: F841  (alive until the record ends)
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    events: list[Any] = [event for thread in threads for event in thread]
    return [one.cpu_memory_usage() for one in events if one.kind() == "memory_alloc"]


def free_cublas_workspaces() -> None:
    """Free the memory that cuBLAS holds for this process's threads; it takes it again."""
    # 2.11.0 to 2.15.0: the only way; CUDA graph trees use it.
    torch._C._cuda_clearCublasWorkspaces()
