"""Calibrate: measure a hardware profile of this machine and its network for the planner.

:func:`measure_hardware` is the short form, for the first call: about two seconds in all, and
about two more for a two-dimensional mesh. :func:`calibrate` is the long form, for
``osdp calibrate``. All ranks measure at the same time, because ranks of one machine share its cores
and its links. Every rank gets rank 0's device figures and the slowest rank's collective times.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from osdp_compile import _torch
from osdp_compile.calibration.collective_times import (
    KINDS,
    Link,
    as_busy_as,
    quick_link,
    swept_link,
    with_busy,
)
from osdp_compile.calibration.timed_collectives import agreed, synchronize
from osdp_compile.runtime.collectives import Group, backend_of, size_of
from osdp_compile.runtime.p2p import group_uses_p2p
from passes.types.hardware import BLOCK_RESTS_BYTES, Hardware, generic

_LEAST_SCRATCH_BYTES = 1 << 23
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Called with the next stage and the finished share, from 0 to 1.
Progress = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A profile, and the measured links behind it.

    ``links``: mesh dimension (``""``: all ranks) -> kind of collective -> link; empty for one rank.
    """

    hardware: Hardware
    links: dict[str, dict[str, Link]]


def measure_hardware(
    group: Group,
    device: torch.device,
    seconds: float = 1.5,
    scratch_bytes: int = 1 << 28,
    along: Mapping[str, dist.ProcessGroup] | None = None,
) -> Hardware:
    """Measure this machine, all ranks of the group together. Collective.

    Args:
        seconds: approximate duration, plus half of it for each mesh dimension. A slow link gets
            smaller messages, not more time.
        scratch_bytes: memory limit of the measurement, at least 8 MiB; training's limit applies
            here too.
        along: as for :func:`calibrate`. Some may be of the model's own collectives.

    Returns the same profile on every rank; for a fake group
    :func:`passes.types.hardware.generic`.
    """
    if backend_of(group, device.type) == "fake":
        return generic(dimensions=tuple(along or ()))
    dtypes = _DTYPES[:1] if device.type == "cpu" else _DTYPES
    scratch_bytes = _least(scratch_bytes, group, device)
    budget = seconds / 18
    rates = _device_rates(dtypes, device, budget, scratch_bytes)
    links: dict[str, dict[str, Link]] = {"": {}}
    if group is not None and group.size() > 1:
        found = {k: quick_link(k, group, device, budget, scratch_bytes) for k in KINDS}
        links[""] = with_busy(found, group, device, seconds / 2)
    for name, one in (along or {}).items():
        links[name] = {}
        for kind in KINDS:
            if kind == "reduce_scatter" and group_uses_p2p(one, device):
                continue  # messages carry it out
            agreed(0.0, group, device)  # all groups of a dimension start together
            link = quick_link(kind, one, device, budget, scratch_bytes)
            links[name][kind] = as_busy_as(link, links[""][kind])
    return _profile(rates, links, group, device)


def calibrate(
    group: Group,
    device: torch.device,
    seconds: float = 20.0,
    scratch_bytes: int = 1 << 30,
    progress: Progress = lambda what, done: None,
    along: Mapping[str, dist.ProcessGroup] | None = None,
) -> Calibration:
    """Measure this machine at length, all ranks of the group together. Collective.

    Args:
        group: None for a single process; its profile has no collectives.
        seconds: approximate duration.
        scratch_bytes: memory limit of the measurement, at least 8 MiB.
        progress: called on every rank.
        along: mesh dimension -> this rank's group along it. These are measured too, all groups of
            a dimension at the same time.
    """
    alone = group is None or dist.get_world_size(group) == 1
    device_share = 1.0 if alone else 0.2
    progress(f"{device.type}: matrix products and copies", 0.0)
    if group is not None:
        scratch_bytes = _least(scratch_bytes, group, device)
    scratch_bytes = max(scratch_bytes, _LEAST_SCRATCH_BYTES)
    rates = _device_rates(_DTYPES, device, device_share * seconds / 5, scratch_bytes)
    links: dict[str, dict[str, Link]] = {}
    if group is not None and not alone:
        groups = {"": group, **{name: one for name, one in (along or {}).items() if one.size() > 1}}
        share = (1 - device_share) / (len(groups) * len(KINDS))
        done = device_share
        for name, one in groups.items():
            links[name] = {}
            for kind in KINDS:
                progress(f"{kind} along {name}" if name else kind, done)
                agreed(0.0, group, device)  # all groups of a dimension start together
                links[name][kind] = swept_link(kind, one, device, share * seconds, scratch_bytes)
                done += share
    progress("done", 1.0)
    return Calibration(_profile(rates, links, group, device), links)


def device_name(device: torch.device) -> str:
    """A device's product name: ``NVIDIA H100 80GB HBM3``, or the CPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:  # not Linux
        models = []
    return models[0] if models else platform.processor() or platform.machine()


def _least(scratch_bytes: int, group: Group, device: torch.device) -> int:
    """The least scratch of all ranks (at least 8 MiB), so that all message sizes are equal."""
    return max(-round(agreed(-float(scratch_bytes), group, device)), _LEAST_SCRATCH_BYTES)


def _device_rates(
    dtypes: Sequence[torch.dtype], device: torch.device, budget_seconds: float, scratch_bytes: int
) -> dict[str, Any]:
    """The profile's fields of the device alone; each rate takes one budget."""
    flops: dict[str, float] = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        flops[name] = matmul_rate(dtype, device, budget_seconds, scratch_bytes)
    return {
        "flops_per_second": {"default": flops["float32"], **flops},
        "memory_bytes_per_second": _copy_bandwidth(device, budget_seconds, scratch_bytes),
        "launch_seconds": _launch_seconds(device),
        "allocator_alignment_bytes": 512 if device.type == "cuda" else 64,
        "library_bytes": library_bytes(device),
        "memory_bytes": _memory_bytes(device),
    }


def _profile(
    rates: dict[str, Any],
    links: dict[str, dict[str, Link]],
    group: Group,
    device: torch.device,
) -> Hardware:
    """The profile of the measurements: rank 0's, on every rank."""
    ranks = size_of(group)
    backend = "" if group is None else f" {backend_of(group, device.type)}"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    collectives = {
        name: {kind: link.rate for kind, link in kinds.items()} for name, kinds in links.items()
    }
    hardware = Hardware(
        name=f"measured {device.type}{backend} x{ranks}",
        collectives=collectives.pop("", {}),
        dimensions=collectives,
        device_type=device.type,
        compute_capability=_compute_capability(device),
        source=f"measured {time.strftime('%Y-%m-%d')} on {device_name(device)}{threads}, "
        f"torch {torch.__version__}",
        **rates,
    )
    if group is None:
        return hardware
    made: list[Any] = [hardware.to_dict()]
    dist.broadcast_object_list(made, src=dist.get_global_rank(group, 0), group=group)
    return Hardware.from_dict(made[0])


def _compute_capability(device: torch.device) -> str:
    """Of a GPU of NVIDIA, as ``9.0``; "" for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def library_bytes(device: torch.device) -> int:
    """``Hardware.library_bytes``: cuBLAS's workspaces for the forward's thread and autograd's.

    It takes one from torch's allocator at the first matrix product of a thread.
    """
    if device.type != "cuda":
        return 0
    _torch.memory.free_cublas_workspaces()
    before_bytes = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.enable_grad():
            x = torch.zeros(128, 128, device=device, dtype=dtype, requires_grad=True)
            bias = torch.zeros(128, device=device, dtype=dtype)
            (torch.nn.functional.linear(x, x, bias) @ x).sum().backward()
        del x, bias
    return torch.cuda.memory_allocated(device) - before_bytes + BLOCK_RESTS_BYTES


def _memory_bytes(device: torch.device) -> int:
    """A GPU's memory, or the machine's memory for a CPU; 0: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return 0


def _timed(run: Callable[[], object], device: torch.device, budget_seconds: float) -> float:
    """Median seconds of 3 to 50 calls, as many as fit in the budget, after a warm-up call."""
    run()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median_high(times)


def matmul_rate(
    dtype: torch.dtype,
    device: torch.device,
    budget_seconds: float,
    scratch_bytes: int = 1 << 28,
) -> float:
    """FLOP/s of a large matrix product."""
    size = 512 if device.type == "cpu" else 4096
    while 3 * size * size * dtype.itemsize > scratch_bytes:
        size //= 2
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _timed(lambda: a @ b, device, budget_seconds)


def _copy_bandwidth(device: torch.device, budget_seconds: float, scratch_bytes: int) -> float:
    """Bytes read and written per second by a copy beyond the caches, if memory allows."""
    # Keep 4 KiB spare: small earlier tensors may be freed a moment late.
    numel = min((1 << 23) if device.type == "cpu" else (1 << 28), (scratch_bytes - 4096) // 8)
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * numel / _timed(lambda: target.copy_(source), device, budget_seconds)


def _launch_seconds(device: torch.device) -> float:
    """The minimum seconds of a kernel: the mean of 100 additions to one element."""
    one = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(100):
            one.add_(1)

    return _timed(run, device, 0.01) / 100
