"""Optimizer times: measured seconds of AdamW's step on made-up parameters.

Most optimizers read and write the parameter, its gradient and its state several times. On a CPU
the arithmetic (a square root, two divisions) costs as much as the bytes, and every sharded
parameter costs the dispatch of a dozen small operators.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from osdp_compile.calibration.timed_collectives import agreed
from osdp_compile.optim.step_hooks import leave_out
from osdp_compile.runtime.collectives import Group
from passes.types.hardware import UPDATE_PASSES, Hardware

#: Elements of a large parameter. On a CPU its operators find the results of earlier operators in a
#: cache, as for most parameters of a model.
_LARGE_NUMEL, _LARGE_NUMEL_CUDA, _LEAST_NUMEL = 1 << 19, 1 << 22, 1 << 14
#: Number of large parameters: together beyond the caches, so that each step begins in memory. With
#: fewer than ``_BEYOND_CACHES`` parameters, data cached between steps make the step look too fast.
_LARGE, _BEYOND_CACHES = 12, 4
#: On a GPU a step takes all parameters together, and its start is dear beside eight of them.
_SMALL, _SMALL_CUDA = 8, 64
_HELD, _TEMPORARIES = 4, 3  # parameter, gradient, two averages; one parameter's temporaries
_HELD_CUDA = _HELD + 1  # a temporary of each parameter


def with_update_seconds(
    hardware: Hardware, group: Group, device: torch.device, most_bytes: int
) -> Hardware:
    """The profile with AdamW's step: seconds per byte that it holds, and per parameter. Collective.

    The parameters are DTensors, as in a sharded model, unless there is one rank. Seconds per plain
    parameter, for a model
    without sharding, are measured too. All ranks measure at the same time, because ranks of one
    machine share its memory bandwidth. Each rank returns its own figures.
    """
    most_numel = most_bytes // 4
    wanted, few, held = _LARGE_NUMEL, _SMALL, _HELD
    if device.type == "cuda":
        wanted, few, held = _LARGE_NUMEL_CUDA, _SMALL_CUDA, _HELD_CUDA
    numel = min(wanted, max(_LEAST_NUMEL, most_numel // (held + _TEMPORARIES)))
    count = min(_LARGE, max(1, (most_numel - _TEMPORARIES * numel) // (held * numel)))
    mesh = None if group is None else DeviceMesh.from_group(group, device.type)
    agreed(0.0, group, device)
    small = _step_seconds(mesh, 1, few, device) / few
    plain = _step_seconds(None, 1, few, device) / few
    large = _step_seconds(mesh, numel, count, device) / count
    each = (large - small) / (_HELD * 4 * numel)
    floor = UPDATE_PASSES / hardware.memory_bytes_per_second
    known = numel == wanted and count >= _BEYOND_CACHES and each > 0
    return dataclasses.replace(
        hardware,
        update_seconds_per_byte=each if known else max(each, floor),
        update_seconds_per_parameter=small,
        update_seconds_per_plain_parameter=plain,
    )


def _step_seconds(mesh: DeviceMesh | None, numel: int, count: int, device: torch.device) -> float:
    """Median seconds of a step over ``count`` parameters of ``numel`` elements a rank.

    ``mesh``: of the sharded parameters; None: plain tensors.
    """

    def laid_out(local: Tensor) -> Tensor:
        if mesh is None:
            return local
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    parameters = []
    for _ in range(count):
        local = torch.zeros(numel, device=device)
        parameter = nn.Parameter(laid_out(local))
        parameter.grad = laid_out(torch.full_like(local, 1e-3))
        parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters)
    leave_out(optimizer)
    times = [_seconds(optimizer.step, device) for _ in range(7)]
    return statistics.median(times[2:])


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
