"""CPU memory: count tensor bytes in torch's CPU allocator.

torch's profiler does not see memory that other threads free, and gloo's worker threads free the
tensors of collectives. So during a measurement an allocator that counts stands in front of
torch's own. It is a few lines of C++. Inductor's compiler for kernels compiles it, once for each
cache folder.
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
#: The peak of the last count, in bytes; empty: nothing was counted yet.
_last_peak: list[int] = []


def start_counting() -> None:
    """Count allocations from now on, starting at zero.

    Raises:
        OsdpError: if a count is active, or the process does not use torch's own allocator.
    """
    problem = _library().osdp_start_counting()
    if problem == 1:
        raise OsdpError("memory is measured already: leave one PeakMemory before entering another")
    if problem:
        raise OsdpError(
            "the CPU allocator of this process cannot be counted: PeakMemory needs torch's own"
        )


def stop_counting() -> tuple[int, int]:
    """The peak of bytes alive, and the bytes alive now."""
    peak_bytes, current_bytes = ctypes.c_int64(), ctypes.c_int64()
    _library().osdp_stop_counting(ctypes.byref(peak_bytes), ctypes.byref(current_bytes))
    _last_peak[:] = [peak_bytes.value]
    return peak_bytes.value, current_bytes.value


def leaves_out(peak_bytes: int, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a peak is that of the last count, and the count missed some of these tensors."""
    if _last_peak != [peak_bytes]:
        return False
    addresses = (tensor.untyped_storage().data_ptr() for tensor in tensors)
    counted = _library().osdp_was_counted
    return any(address and not counted(ctypes.c_void_p(address)) for address in addresses)


@functools.cache
def _library() -> ctypes.CDLL:
    # Inductor's libraries are not linked with c10. torch has loaded it without global symbols.
    c10 = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    ctypes.CDLL(str(c10), mode=ctypes.RTLD_GLOBAL)
    source = resources.files("osdp_compile.reports").joinpath(_SOURCE).read_text()
    library = _torch.inductor.compiled_library(source)
    library.osdp_was_counted.restype = ctypes.c_bool
    return library
