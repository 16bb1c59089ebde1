"""Calibrate: measure what the planner must know of this machine and its network.

A short form, for the first call: about a second in all. Every rank measures at the same
time, because ranks of one machine share its cores and its links; rank 0's figures, and
for collectives the slowest rank's, are everyone's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from osdp_compile.collectives import all_gather_single, reduce_scatter_single
from passes.hardware import Hardware, LinkRate, generic

_SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def measure_hardware(
    group: dist.ProcessGroup, device: torch.device, seconds: float = 1.5
) -> Hardware:
    """Measure this machine, all ranks of the group together. Collective.

    Args:
        seconds: about how long it may take. A slow link gets smaller messages, not more time.

    Returns the same profile on every rank. A fake group measures nothing real: it gets
    :func:`passes.hardware.generic`.
    """
    if dist.get_backend(group) == "fake":
        return generic()
    budget = seconds / 8
    flops = {"default": _flops(torch.float32, device, budget)}
    flops["float32"] = flops["default"]
    if device.type != "cpu":
        flops["bfloat16"] = flops["float16"] = _flops(torch.bfloat16, device, budget)
    bandwidth = _copy_bandwidth(device, budget)
    launch = _launch_seconds(device)
    links = {kind: _link(kind, group, device, budget) for kind in _KINDS}
    figures = torch.tensor(
        [flops["default"], flops.get("bfloat16", 0.0), bandwidth, launch], dtype=torch.float64
    )
    figures = figures.to(device) if device.type != "cpu" else figures
    dist.broadcast(figures, src=dist.get_global_rank(group, 0), group=group)
    peak, half, bandwidth, launch = figures.tolist()
    rates = {"default": peak, "float32": peak}
    if half:
        rates.update(bfloat16=half, float16=half)
    return Hardware(
        name=f"measured {device.type} {dist.get_backend(group)} x{dist.get_world_size(group)}",
        flops_per_second=rates,
        memory_bytes_per_second=bandwidth,
        launch_seconds=launch,
        collectives=links,
        allocator_alignment_bytes=512 if device.type == "cuda" else 64,
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _timed(run: Callable[[], object], device: torch.device, budget_seconds: float) -> float:
    """Median seconds of a call, over as many as fit in the budget (3 to 50), one to warm up."""
    run()
    _synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return _median(times)


def _flops(dtype: torch.dtype, device: torch.device, budget_seconds: float) -> float:
    size = 512 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _timed(lambda: a @ b, device, budget_seconds)


def _copy_bandwidth(device: torch.device, budget_seconds: float) -> float:
    """Bytes read and written a second by a copy too large for the caches."""
    numel = (1 << 23) if device.type == "cpu" else (1 << 28)
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * numel / _timed(lambda: target.copy_(source), device, budget_seconds)


def _launch_seconds(device: torch.device) -> float:
    """The least a kernel takes: adding to one element, many times."""
    one = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(100):
            one.add_(1)

    return _timed(run, device, 0.01) / 100


def _collective(kind: str, group: dist.ProcessGroup, whole: torch.Tensor) -> Callable[[], object]:
    """A call of one collective whose whole tensor (over all ranks) is ``whole``."""
    world = dist.get_world_size(group)
    part = whole[: whole.numel() // world].clone()
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: all_gather_single(other, part, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[kind]


def _agreed(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest of a figure over the ranks, so that all go on alike."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor.item())


def _link(
    kind: str, group: dist.ProcessGroup, device: torch.device, budget_seconds: float
) -> LinkRate:
    """Latency and inverse bandwidth of a collective: a fit over sizes that the budget allows."""
    world = dist.get_world_size(group)
    factor = (2 if kind == "all_reduce" else 1) * (world - 1) / world
    points: list[tuple[float, float]] = []
    spent = 0.0
    for size_bytes in _SIZES_BYTES:
        numel = size_bytes // 4 // world * world
        run = _collective(kind, group, torch.zeros(numel, device=device))
        times = []
        for _ in range(6):
            _synchronize(device)
            start = time.perf_counter()
            run()
            _synchronize(device)
            times.append(time.perf_counter() - start)
            once = _agreed(times[-1], group, device)
            spent += once
            if spent > budget_seconds and len(times) >= 2:
                break
        # The first of a size sets up buffers and connections.
        points.append((4 * numel * factor, _agreed(_median(times[1:]), group, device)))
        # The next size is 4 to 16 times this one: stop before it would overrun by much.
        if spent + 8 * points[-1][1] > 2 * budget_seconds and len(points) >= 3:
            break
    return _fit(points)


def _fit(points: list[tuple[float, float]]) -> LinkRate:
    """Least squares of ``latency + bytes * rate``, relative errors weighted alike."""
    sw = sx = sy = sxx = sxy = 0.0
    for x, y in points:
        w = 1 / y**2
        sw, sx, sy, sxx, sxy = sw + w, sx + w * x, sy + w * y, sxx + w * x * x, sxy + w * x * y
    rate = (sw * sxy - sx * sy) / (sw * sxx - sx * sx)
    rate = max(rate, 1e-13)
    latency = max((sy - rate * sx) / sw, 1e-7)
    return LinkRate(latency_seconds=latency, seconds_per_byte=rate)
