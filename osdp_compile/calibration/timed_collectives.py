"""Timed collectives: one of a kind and size, or a stream of them.

Every function here is collective. The number of repeats depends only on times that all ranks agree
on. If a rank decided by its own clock, the others would wait for ever.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from osdp_compile.calibration.line_fit import Sample, typical_seconds
from osdp_compile.runtime.collectives import Group, all_gather_single, reduce_scatter_single
from osdp_compile.runtime.p2p import group_uses_p2p, start_exchange, start_gather
from passes.types.hardware import wire_bytes

SMALL_BYTES = 1 << 12
FIRST_BYTES = 1 << 18
_MOST_BYTES = 1 << 26
#: Up to this size latency dominates.
_SMALL_ENOUGH_BYTES = 1 << 16
IN_FLIGHT = 4
#: A tensor to send, one to receive, a part, and gloo's copy: less than four times the size.
_BUFFERS = 4
Start = Callable[[], list[dist.Work]]


def collective(
    kind: str, group: dist.ProcessGroup, size_bytes: int, device: torch.device
) -> tuple[Start, int]:
    """A function that starts one collective of about ``size_bytes``, and its wire bytes."""
    world = dist.get_world_size(group)
    numel = max(1, size_bytes // 4 // world) * world
    whole = torch.ones(numel, device=device)
    part = torch.ones(numel // world, device=device)
    other = torch.ones(numel, device=device)
    calls: dict[str, Callable[[], Any]] = {  # of a Work
        "all_gather": lambda: all_gather_single(other, part, group=group, async_op=True),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group, async_op=True),
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group, async_op=True),
    }
    sent_bytes = round(wire_bytes(kind, 4 * numel, world))
    if kind == "all_gather" and group_uses_p2p(group, device):
        return lambda: start_gather(other, part, group), sent_bytes
    if kind == "all_to_all" and group_uses_p2p(group, device):
        return lambda: start_exchange(other, whole, group), sent_bytes
    return lambda: [calls[kind]()], sent_bytes


def sample_of(
    kind: str,
    size_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    budget_seconds: float,
    least: int = 1,
) -> tuple[Sample, float]:
    """The sample of one collective, from as many as fit in the budget; total seconds.

    ``least``: minimum number of repeats; the maximum is 25. Small collectives start together on
    all ranks, and the minimum counts, because delays only add. Large ones follow each other without
    a pause, because a shaped link is faster than its rate after a pause; :func:`typical_seconds`
    counts. Messages of more than two ranks overlap: see :func:`in_flight_of`.
    """
    start, wire = collective(kind, group, size_bytes, device)
    warm = _alone(start, group, device)  # sets up connections
    first = _alone(start, group, device)
    repeats = min(25, max(least, int((budget_seconds - warm) / max(first, 1e-6))))
    if size_bytes <= _SMALL_ENOUGH_BYTES:
        times = [first, *(_alone(start, group, device) for _ in range(repeats - 1))]
        return Sample(wire, min(times)), warm + sum(times)
    if repeats == 1:
        return Sample(wire, first), warm + first
    took = stream(start, repeats, group, device, in_flight_of(kind, group, device))
    return Sample(wire, took), warm + first + (repeats + 1) * took


def _alone(start: Start, group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of one collective, from its start to its end; slowest rank."""
    synchronize(device)
    begin = time.perf_counter()
    for work in start():
        work.wait()
    synchronize(device)
    return agreed(time.perf_counter() - begin, group, device)


def stream(
    start: Start, count: int, group: dist.ProcessGroup, device: torch.device, in_flight: int = 1
) -> float:
    """Typical seconds of ``count`` back-to-back collectives, after a warm-up; slowest rank.

    ``in_flight``: how many there are at a time. The seconds are those between two ends.
    """
    ends: list[float] = [time.perf_counter()]
    flying = [start() for _ in range(in_flight - 1)]
    for _ in range(count + 1):
        flying.append(start())
        for work in flying.pop(0):
            work.wait()
        synchronize(device)
        ends.append(time.perf_counter())
    for work in itertools.chain(*flying):
        work.wait()
    times = [end - begin for begin, end in itertools.pairwise(ends)]
    return agreed(typical_seconds(times[1:]), group, device)


def in_flight_of(kind: str, group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives a schedule has in flight while the network is busy.

    Messages of a rank to several others share its link, some end later than others, and the next
    collective uses what is free meanwhile. One at a time takes a third longer on four hosts. Three
    are as fast as the link.
    """
    messages = kind in ("all_gather", "all_to_all") and group_uses_p2p(group, device)
    return 3 if messages and dist.get_world_size(group) > 2 else 1


def most_bytes_of(scratch_bytes: int, device: torch.device) -> int:
    """Bytes of the largest tensor to send. On a CPU only one is in flight at a time."""
    in_flight = 1 if device.type == "cpu" else IN_FLIGHT
    return min(_MOST_BYTES, scratch_bytes // (_BUFFERS * in_flight))


def agreed(value: float, group: Group, device: torch.device) -> float:
    """The maximum of a figure over the ranks, so that all ranks decide alike."""
    if group is None:
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor.item())


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
