"""Step times: seconds of a step's operators and optimizer while all ranks are busy.

Ranks of one machine share its memory, its caches and its clock. An operator looks too fast if the
other ranks are idle. So all ranks time the optimizer's step together, and the other ranks multiply
matrices while rank 0 times the operators.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from osdp_compile.calibration.operator_times import with_kernel_seconds
from osdp_compile.calibration.optimizer_times import with_update_seconds
from osdp_compile.calibration.timed_collectives import agreed
from osdp_compile.runtime.collectives import Group
from passes.graph.captured import Captured
from passes.types.context import Context
from passes.types.hardware import Hardware

_KERNELS_SECONDS = 1.5
_BUSY_SIZE = 256


def with_step_seconds(
    captured: Captured | None,
    ctx: Context,
    group: Group,
    device: torch.device,
    most_bytes: int,
) -> Hardware:
    """The context's profile with times of this step's operators and of the optimizer. Collective.

    Args:
        captured: the step, on rank 0; None on the others.
        most_bytes: memory limit of the measurement.

    Returns the profile; only rank 0's has operator times.
    """
    hardware = ctx.hardware
    if not hardware.update_seconds_per_byte:
        hardware = with_update_seconds(hardware, group, device, most_bytes)
    agreed(0.0, group, device)  # rank 0 waits for the others
    if captured is None:
        assert group is not None  # this rank is not rank 0
        _work_until_told(group, device)
        return hardware
    try:
        ctx = ctx.replace(hardware=hardware)
        return with_kernel_seconds(captured, ctx, device, _KERNELS_SECONDS, most_bytes)
    finally:
        if group is not None:
            _told(group, device).wait()


def _told(group: dist.ProcessGroup, device: torch.device) -> dist.Work:
    """Start the broadcast by which rank 0 tells the others that it is done."""
    source = dist.get_global_rank(group, 0)
    nothing = torch.zeros(1, device=device)
    work: dist.Work | None = dist.broadcast(nothing, src=source, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    return work


def _work_until_told(group: dist.ProcessGroup, device: torch.device) -> None:
    done = _told(group, device)
    if device.type == "cpu":  # ranks do not share GPUs
        a = torch.ones(_BUSY_SIZE, _BUSY_SIZE)
        out = torch.empty_like(a)
        while not done.is_completed():
            torch.mm(a, a, out=out)
    done.wait()
