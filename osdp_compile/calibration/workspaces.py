"""Workspaces: measured temporary memory of a step's large operators.

oneDNN chooses a convolution's algorithm by shape, instruction set and number of threads, and each
takes other memory: up to 16 times the formula of ``passes/annotate/workspace.py``. So each distinct
operator runs on made-up inputs of its shapes and strides, and its allocations are counted. On a GPU
attention's backward and cuDNN's convolutions allocate too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import fx

from osdp_compile import _torch
from osdp_compile.calibration.operator_times import large_operators, on_made_up_inputs
from passes.graph.captured import Captured

log = logging.getLogger("osdp_compile")

_CPU = torch.device("cpu")
_aten = torch.ops.aten
#: On a CPU, matrix products take temporary memory from their library, not from torch's allocator.
_WITHOUT = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)


def measured_workspaces(
    captured: Captured, device: torch.device, most_bytes: int
) -> dict[str, int]:
    """Bytes that each large operator of a step allocates and frees, by ``kernel_key``.

    Args:
        most_bytes: limit of one operator's inputs and outputs; larger operators are left out.

    Operators that are left out, or that fail on made-up inputs, are not in the result.
    """
    found: dict[str, int] = {}
    with _measuring(device) as workspace_bytes:
        for key, node in large_operators(captured, most_bytes).items():
            if device.type == "cpu" and node.target in _WITHOUT:
                continue
            try:
                found[key] = workspace_bytes(node)
            except (RuntimeError, TypeError, ValueError) as error:
                log.debug("%s does not run on made-up inputs, sized by formula: %s", key, error)
    return found


@contextlib.contextmanager
def _measuring(device: torch.device) -> Iterator[Callable[[fx.Node], int]]:
    """A function that measures an operator."""
    if device.type != "cpu":  # in this thread: cuBLAS would keep a workspace for another one
        yield lambda node: _on_gpu(node, device)
        return
    threads = torch.get_num_threads()
    # Allocations are recorded for one thread: those of other OpenMP threads, 128 bytes each in
    # attention's backward, are missed. The caller's thread may be under a profiler already.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as own:
        yield lambda node: own.submit(_on_cpu, node).result()


def _on_gpu(node: fx.Node, device: torch.device) -> int:
    """Bytes that an operator frees while it runs. The peak statistics stay the user's own."""
    run = on_made_up_inputs(node, device)
    run()  # libraries take what they keep
    before_bytes = _freed_bytes(device)
    result = run()  # noqa: F841  (alive until the bytes are read)
    return _freed_bytes(device) - before_bytes


def _freed_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator has freed since the process began."""
    return int(torch.cuda.memory_stats(device)["allocated_bytes.all.freed"])


def _on_cpu(node: fx.Node) -> int:
    changes_bytes = _torch.memory.allocations_of(on_made_up_inputs(node, _CPU))
    alive_bytes = list(itertools.accumulate(changes_bytes, initial=0))
    return max(alive_bytes) - alive_bytes[-1]
