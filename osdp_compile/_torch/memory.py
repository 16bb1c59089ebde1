"""Memory: allocations on the CPU, and cuBLAS's workspaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
