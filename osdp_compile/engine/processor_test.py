"""Test of the processor: Inductor's search for vector instructions, while rank 0 plans.

Before its first kernel for a CPU, Inductor compiles and runs a small program for each kind of
vector instructions that the processor names: seconds of C++ compilation on a fresh machine. Ranks
of one host share the programs through Inductor's cache folder and its locks.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from osdp_compile import _torch


def start_processor_test(device: torch.device) -> threading.Thread | None:
    """Start the test in a thread if the device is a CPU. Inductor then waits for its results."""
    if device.type != "cpu":
        return None
    thread = threading.Thread(target=_test, name="osdp: vector instructions", daemon=True)
    thread.start()
    return thread


def _test() -> None:
    with contextlib.suppress(Exception):  # Inductor repeats the test, and raises
        _torch.inductor.vector_instructions()
