"""What tensors take on the CPU, counted where torch allocates it.

torch's profiler does not see what other threads free, and gloo's workers drop a collective's
tensors when they get to it: a peak was up to 4 % too high so, and differed from run to run. So
an allocator that counts is put before torch's own, for as long as one counts. It is a few lines
of C++, compiled where and as Inductor compiles its kernels, once a cache.
"""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from pathlib import Path

import torch

from osdp_compile import _torch
from osdp_compile.errors import OsdpError

_SOURCE = "counting_allocator.cpp"


def start_counting() -> None:
    """Count, from zero, what is allocated from now on.

    Raises:
        OsdpError: if it is counted already, or the process has an allocator of another kind.
    """
    problem = _library().osdp_start_counting()
    if problem == 1:
        raise OsdpError("memory is measured already: leave one PeakMemory before entering another")
    if problem:
        raise OsdpError(
            "the CPU allocator of this process cannot be counted: PeakMemory needs torch's own"
        )


def stop_counting() -> tuple[int, int]:
    """The most bytes that were alive at once, and those that are alive now."""
    peak_bytes, current_bytes = ctypes.c_int64(), ctypes.c_int64()
    _library().osdp_stop_counting(ctypes.byref(peak_bytes), ctypes.byref(current_bytes))
    return peak_bytes.value, current_bytes.value


@functools.cache
def _library() -> ctypes.CDLL:
    # Inductor's libraries are not linked with c10; torch has loaded it, but for itself alone.
    c10 = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    ctypes.CDLL(str(c10), mode=ctypes.RTLD_GLOBAL)
    return _torch.compiled_library(resources.files("osdp_compile").joinpath(_SOURCE).read_text())
