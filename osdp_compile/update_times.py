"""Update times: what an optimizer's step takes, by running AdamW on a made-up parameter.

Most optimizers read and write the parameter, its gradient and its state some times over; on
a CPU the arithmetic (a square root, two divisions) counts as much as the bytes, and every
sharded parameter costs the dispatch of a dozen small operators.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from osdp_compile.links import agreed
from passes.hardware import UPDATE_PASSES, Hardware

_MOST_NUMEL = 1 << 21  # 48 MiB with gradient, state and temporaries: beyond the caches
_LEAST_NUMEL = 1 << 14
_PARAMETERS = 8
_TENSORS = 6  # parameter, gradient, two averages, two temporaries


def with_update_seconds(
    hardware: Hardware, group: dist.ProcessGroup, device: torch.device, most_bytes: int
) -> Hardware:
    """The profile with AdamW's step: seconds for each byte it holds, and for each parameter.

    The parameters are DTensors, as the sharded model's are. Collective: ranks of one machine
    share its memory's bandwidth, so all measure at once. Each returns its own figures.
    """
    numel = min(_MOST_NUMEL, max(_LEAST_NUMEL, most_bytes // (4 * _TENSORS)))
    mesh = DeviceMesh.from_group(group, device.type)
    agreed(0.0, group, device)
    small = _step_seconds(mesh, 1, _PARAMETERS, device) / _PARAMETERS
    large = _step_seconds(mesh, numel, 1, device)
    held_bytes = 4 * 4 * numel
    return dataclasses.replace(
        hardware,
        # What is small enough to be measured here may stay in a cache; in training it does not.
        update_seconds_per_byte=max(
            (large - small) / held_bytes, UPDATE_PASSES / hardware.memory_bytes_per_second
        ),
        update_seconds_per_parameter=small,
    )


def _step_seconds(mesh: DeviceMesh, numel: int, count: int, device: torch.device) -> float:
    """Median seconds of a step over ``count`` parameters of ``numel`` elements a rank."""
    parameters = []
    for _ in range(count):
        local = torch.zeros(numel, device=device)
        parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        gradient = torch.full_like(local, 1e-3)
        parameter.grad = DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False)
        parameters.append(parameter)
    step = torch.optim.AdamW(parameters).step
    times = [_seconds(step, device) for _ in range(7)]
    return sorted(times[2:])[2]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
