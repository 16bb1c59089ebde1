"""Workspaces: measured temporary memory of a step's large operators on a CPU.

oneDNN chooses a convolution's algorithm by shape, instruction set and number of threads, and each
takes other memory: up to 16 times the formula of ``passes/annotate/workspace.py``. So each distinct
operator runs once on made-up inputs of its shapes and strides, and its allocations are counted.
"""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import fx

from osdp_compile import _torch
from osdp_compile.calibration.operator_times import large_operators, on_made_up_inputs
from passes.graph.captured import Captured

log = logging.getLogger("osdp_compile")

_CPU = torch.device("cpu")
_aten = torch.ops.aten
#: Matrix products take their temporary memory from their library and not from torch's allocator.
_WITHOUT = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)


def measured_workspaces(captured: Captured, most_bytes: int) -> dict[str, int]:
    """Bytes that each large operator of a step allocates and frees, by ``kernel_key``.

    Args:
        most_bytes: limit of one operator's inputs and outputs; larger operators are left out.

    Operators that are left out, or that fail on made-up inputs, are not in the result.
    """
    found: dict[str, int] = {}
    threads = torch.get_num_threads()
    # Allocations are recorded for one thread. The caller's thread may be under a profiler already.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as own:
        for key, node in large_operators(captured, most_bytes).items():
            if node.target in _WITHOUT:
                continue
            try:
                found[key] = own.submit(_workspace_bytes, node).result()
            except (RuntimeError, TypeError, ValueError) as error:
                log.debug("%s does not run on made-up inputs, sized by formula: %s", key, error)
    return found


def _workspace_bytes(node: fx.Node) -> int:
    changes_bytes = _torch.allocations_of(on_made_up_inputs(node, _CPU))
    alive_bytes = list(itertools.accumulate(changes_bytes, initial=0))
    return max(alive_bytes) - alive_bytes[-1]
