"""What tensors take on the CPU, counted where torch allocates it.

torch's profiler does not see what other threads free, and gloo's workers drop a collective's
tensors when they get to it: a peak was up to 4 % too high so, and differed from run to run. So
an allocator that counts is put before torch's own, for as long as one counts. It is a few lines
of C++, compiled where and as Inductor compiles its kernels, once a cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import torch

from osdp_compile import _torch
from osdp_compile.errors import OsdpError

_SOURCE = "counting_allocator.cpp"
#: What was counted last, in bytes; empty: nothing yet.
_last_peak: list[int] = []


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
    _last_peak[:] = [peak_bytes.value]
    return peak_bytes.value, current_bytes.value


def leaves_out(peak_bytes: int, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a peak is the one that was counted last, without some tensors that are alive."""
    if _last_peak != [peak_bytes]:
        return False
    addresses = (tensor.untyped_storage().data_ptr() for tensor in tensors)
    counted = _library().osdp_was_counted
    return any(address and not counted(ctypes.c_void_p(address)) for address in addresses)


@functools.cache
def _library() -> ctypes.CDLL:
    # Inductor's libraries are not linked with c10; torch has loaded it, but for itself alone.
    c10 = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    ctypes.CDLL(str(c10), mode=ctypes.RTLD_GLOBAL)
    source = resources.files("osdp_compile.reports").joinpath(_SOURCE).read_text()
    library = _torch.compiled_library(source)
    library.osdp_was_counted.restype = ctypes.c_bool
    return library
