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

from osdp_compile.collectives import all_gather_single, backend_of, reduce_scatter_single
from osdp_compile.exchange import by_messages, start_exchange, start_gather
from passes.hardware import Hardware, LinkRate, generic

_SMALL_BYTES = 1 << 12
_FIRST_BYTES = 1 << 18
_MOST_BYTES = 1 << 26
_IN_FLIGHT = 4
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def measure_hardware(
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float = 1.5,
    scratch_bytes: int = 1 << 28,
) -> Hardware:
    """Measure this machine, all ranks of the group together. Collective.

    Args:
        seconds: about how long it may take. A slow link gets smaller messages, not more time.
        scratch_bytes: the most memory to take (at least 8 MiB): training's limit holds here too.

    Returns the same profile on every rank. A fake group measures nothing real: it gets
    :func:`passes.hardware.generic`.
    """
    backend = backend_of(group, device.type)
    if backend == "fake":
        return generic()
    budget = seconds / 8
    flops = {"default": _flops(torch.float32, device, budget)}
    flops["float32"] = flops["default"]
    if device.type != "cpu":
        flops["bfloat16"] = flops["float16"] = _flops(torch.bfloat16, device, budget)
    scratch_bytes = max(scratch_bytes, 1 << 23)
    bandwidth = _copy_bandwidth(device, budget, scratch_bytes)
    launch = _launch_seconds(device)
    links = {kind: _link(kind, group, device, budget, scratch_bytes) for kind in _KINDS}
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
        name=f"measured {device.type} {backend} x{dist.get_world_size(group)}",
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


def _copy_bandwidth(device: torch.device, budget_seconds: float, scratch_bytes: int) -> float:
    """Bytes read and written a second by a copy too large for the caches, if memory allows."""
    numel = min((1 << 23) if device.type == "cpu" else (1 << 28), scratch_bytes // 8)
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


def _collective(
    kind: str, group: dist.ProcessGroup, size_bytes: int, device: torch.device
) -> tuple[Callable[[], list[dist.Work]], int]:
    """A call that starts one collective on a tensor of about this size; and its wire bytes."""
    world = dist.get_world_size(group)
    numel = max(1, size_bytes // 4 // world) * world
    whole = torch.zeros(numel, device=device)
    part = torch.zeros(numel // world, device=device)
    other = torch.zeros(numel, device=device)
    if kind in ("all_gather", "all_to_all") and by_messages(group, device):
        wire_bytes = 4 * numel * (world - 1) // world
        if kind == "all_gather":
            return lambda: start_gather(other, part, group), wire_bytes
        return lambda: start_exchange(other, whole, group), wire_bytes
    calls: dict[str, Callable[[], dist.Work]] = {
        "all_gather": lambda: all_gather_single(other, part, group=group, async_op=True),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group, async_op=True),
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group, async_op=True),
    }
    wire_bytes = 4 * numel * (world - 1) // world * (2 if kind == "all_reduce" else 1)
    return lambda: [calls[kind]()], wire_bytes


def _agreed(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest of a figure over the ranks, so that all go on alike."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor.item())


def _burst(
    starts: list[Callable[[], list[dist.Work]]], group: dist.ProcessGroup, device: torch.device
) -> float:
    """Seconds from starting some collectives at once until all have ended, on the slowest rank."""
    _synchronize(device)
    begin = time.perf_counter()
    for works in [start() for start in starts]:
        for work in works:
            work.wait()
    _synchronize(device)
    return _agreed(time.perf_counter() - begin, group, device)


def _link(
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device,
    budget_seconds: float,
    scratch_bytes: int = 1 << 28,
) -> LinkRate:
    """Latency and inverse bandwidth of a collective, as a training step meets them.

    Latency: a small one alone. Bandwidth: several in flight at once, as the passes emit
    them; alone, a large message over TCP can take half as long again, because the window
    opens anew for each. The size grows until a burst is long enough to tell.
    """
    small, _ = _collective(kind, group, _SMALL_BYTES, device)
    _burst([small], group, device)  # sets up connections
    latency = min(_burst([small], group, device) for _ in range(5))
    size_bytes = _FIRST_BYTES
    # Each has a tensor to send, one to receive, and a part: less than three times its size.
    most_bytes = min(_MOST_BYTES, scratch_bytes // (3 * _IN_FLIGHT))
    while True:
        made = [_collective(kind, group, size_bytes, device) for _ in range(_IN_FLIGHT)]
        starts = [start for start, _ in made]
        wire_bytes = made[0][1]
        elapsed = _burst(starts, group, device)
        if elapsed >= budget_seconds / 4 or 4 * size_bytes > most_bytes:
            break
        size_bytes *= 4
    if elapsed < budget_seconds / 2:
        elapsed = min(elapsed, _burst(starts, group, device))
    rate = max(elapsed / _IN_FLIGHT - latency, 0.1 * elapsed / _IN_FLIGHT) / wire_bytes
    return LinkRate(latency_seconds=max(latency, 1e-7), seconds_per_byte=rate)
