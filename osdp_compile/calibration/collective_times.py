"""Collective times: measured latency, bandwidth and compute overhead of a group's collectives.

Two forms: :func:`quick_link` for the first call, from a small and a large message, and
:func:`swept_link` for ``osdp calibrate``, from a sweep over sizes.

Every function here is collective. The number of repeats depends only on times that all ranks agree
on. If a rank decided by its own clock, the others would wait for ever.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from osdp_compile.calibration.line_fit import Fit, Sample, fit_line, typical_seconds
from osdp_compile.runtime.collectives import (
    Group,
    all_gather_single,
    backend_of,
    reduce_scatter_single,
)
from osdp_compile.runtime.p2p import group_uses_p2p, start_exchange, start_gather
from passes.types.hardware import Hardware, LinkRate, wire_bytes

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

_SMALL_BYTES = 1 << 12
_FIRST_BYTES = 1 << 18
_MOST_BYTES = 1 << 26
#: Up to this size latency dominates.
_SMALL_ENOUGH_BYTES = 1 << 16
_IN_FLIGHT = 4
#: A tensor to send, one to receive, a part, and gloo's copy: less than four times the size.
_BUFFERS = 4
#: Duration of collectives beside timed computing: this, or up to twice this.
_BESIDE_SECONDS = 0.02
#: Size of a large message of a training step, and repeats of the start delay measurement.
_WAKE_BYTES, _WAKE_REPEATS = 1 << 22, 11
#: Repeats for the compute overhead: of small collectives for ``start_seconds``, of large ones for
#: the overhead per byte.
_START_REPEATS, _LARGE_REPEATS = 20, 3
#: Longest wait for a collective that has ended already.
_THERE_SECONDS = 2e-4
#: Check of a cached profile: predicted seconds of its collective, number of tries, and the factor
#: between measured and predicted seconds that means another network.
_CHECK_SECONDS, _CHECKS, _OTHER_NETWORK = 0.02, 3, 2.0

Start = Callable[[], list[dist.Work]]


@dataclasses.dataclass(frozen=True)
class Link:
    """Measurements of one kind of collective.

    ``fit``: the line through ``samples``; exact for two samples.
    """

    rate: LinkRate
    fit: Fit
    samples: tuple[Sample, ...]


def quick_link(
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device,
    budget_seconds: float,
    scratch_bytes: int,
) -> Link:
    """Latency and inverse bandwidth from two sizes, in about three times the budget.

    The large size grows until one collective takes a quarter of the budget, so a slow link gets
    smaller messages and hardly more time. The fit ignores sizes in between: a shaped link passes
    the first bytes at once, and they would bias it. For the same reason the large size is sent
    without pauses.
    """
    small, _ = _sample(kind, _SMALL_BYTES, group, device, budget_seconds / 4, least=7)
    size_bytes, most_bytes = _FIRST_BYTES, _most_bytes(scratch_bytes, device)
    while True:
        large, _ = _sample(kind, size_bytes, group, device, 0.0)
        if large.seconds >= budget_seconds / 4 or 4 * size_bytes > most_bytes:
            break
        size_bytes *= 4
    # An outlier among seven times is in two of six pairs, so it does not change the median.
    large, _ = _sample(kind, size_bytes, group, device, 2 * budget_seconds, least=7)
    fit = fit_line([small, large])
    rate = _fitted(kind, fit, group, device)
    return Link(rate, fit, (small, large))


def with_busy(
    links: dict[str, Link], group: dist.ProcessGroup, device: torch.device, budget_seconds: float
) -> dict[str, Link]:
    """The links with compute overhead per byte and start delay.

    On a CPU each kind has its own overhead, in processor time. Elsewhere the noise exceeds the
    difference of the kinds, so one kind is measured for all. The start delay too is measured on one
    kind for all.
    """
    world = dist.get_world_size(group)

    def busy_of(kind: str) -> float:
        last = links[kind].samples[-1]
        full_bytes = round(last.wire_bytes / wire_bytes(kind, 1, world))
        return _busy_seconds_per_byte(
            kind, full_bytes, last.seconds, links[kind].rate, group, device, budget_seconds
        )

    one = _one_for_all(group, device)
    wake = _wake_seconds(one, links[one].fit, group, device)
    if device.type == "cpu":
        busy = {kind: busy_of(kind) for kind in links}
    else:
        busy = dict.fromkeys(links, busy_of(one))
    return {
        kind: dataclasses.replace(
            link,
            rate=dataclasses.replace(
                link.rate, overhead_seconds_per_byte=busy[kind], start_delay_seconds=wake
            ),
        )
        for kind, link in links.items()
    }


def as_busy_as(link: Link, other: Link) -> Link:
    """The link with the compute overhead per byte and start delay of another link of the device."""
    rate = dataclasses.replace(
        link.rate,
        overhead_seconds_per_byte=other.rate.overhead_seconds_per_byte,
        start_delay_seconds=other.rate.start_delay_seconds,
    )
    return dataclasses.replace(link, rate=rate)


def rates_hold(hardware: Hardware, group: Group, device: torch.device, scratch_bytes: int) -> bool:
    """Whether collectives still take about the profile's seconds; the network may have changed.

    Runs one kind, of about :data:`_CHECK_SECONDS`. At most three tries, because a shared machine
    is slow now and then.
    """
    if group is None:
        return True
    world = group.size()
    kind = _one_for_all(group, device)
    size_bytes, most_bytes = _FIRST_BYTES, _most_bytes(scratch_bytes, device)
    while (
        hardware.collective_seconds(kind, size_bytes, world) < _CHECK_SECONDS
        and 4 * size_bytes <= most_bytes
    ):
        size_bytes *= 4
    said_seconds = hardware.collective_seconds(kind, size_bytes, world)
    start, _ = _collective(kind, group, size_bytes, device)
    for _ in range(_CHECKS):
        seconds = _stream(start, 3, group, device, _in_flight(kind, group, device))
        if said_seconds / _OTHER_NETWORK < seconds < said_seconds * _OTHER_NETWORK:
            return True
    return False


def swept_link(
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device,
    budget_seconds: float,
    scratch_bytes: int,
) -> Link:
    """Latency and inverse bandwidth by least squares over sizes from 4 KiB to 64 MiB.

    Leaves out sizes beyond the scratch memory, and beyond the budget, but for the first three.
    """
    most_bytes = _most_bytes(scratch_bytes, device)
    sizes = [_SMALL_BYTES * 4**i for i in range(8) if _SMALL_BYTES * 4**i <= most_bytes]
    samples: list[Sample] = []
    left_seconds = 0.7 * budget_seconds
    for index, size_bytes in enumerate(sizes):
        # The next size takes four times as long, and runs at least six times.
        if len(samples) >= 3 and 4 * 6 * samples[-1].seconds > left_seconds:
            break
        share_seconds = left_seconds / (len(sizes) - index)
        sample, spent_seconds = _sample(kind, size_bytes, group, device, share_seconds, least=3)
        left_seconds -= spent_seconds
        samples.append(sample)
    last_bytes = sizes[len(samples) - 1]
    fit = fit_line(samples)
    rate = _fitted(kind, fit, group, device)
    busy = _busy_seconds_per_byte(
        kind, last_bytes, samples[-1].seconds, rate, group, device, 0.3 * budget_seconds
    )
    wake = _wake_seconds(kind, fit, group, device)
    rate = dataclasses.replace(rate, overhead_seconds_per_byte=busy, start_delay_seconds=wake)
    return Link(rate, fit, tuple(samples))


def _one_for_all(group: dist.ProcessGroup, device: torch.device) -> str:
    """The kind of collective that is measured for all kinds."""
    return "all_to_all" if group_uses_p2p(group, device) else "all_gather"


def _fitted(kind: str, fit: Fit, group: dist.ProcessGroup, device: torch.device) -> LinkRate:
    """A kind's rate, without compute overhead per byte and start delay."""
    return LinkRate(
        fit.latency_seconds,
        fit.seconds_per_byte,
        start_seconds=_start_seconds(kind, group, device),
        carried_out=carried_out(kind, group, device),
    )


def carried_out(kind: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """The algorithm of a kind of collective on a group, for people."""
    backend = backend_of(group, device.type)
    if backend == "nccl":
        return "as NCCL chooses"
    if backend != "gloo":
        return backend
    if kind == "reduce_scatter":
        return "all_reduce inside"  # and drops the other rows: gloo has no other algorithm
    if kind == "all_to_all" or (kind == "all_gather" and group_uses_p2p(group, device)):
        return "messages"
    return "ring"


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


def _most_bytes(scratch_bytes: int, device: torch.device) -> int:
    """Bytes of the largest tensor to send. On a CPU only one is in flight at a time."""
    in_flight = 1 if device.type == "cpu" else _IN_FLIGHT
    return min(_MOST_BYTES, scratch_bytes // (_BUFFERS * in_flight))


def _collective(
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


def _burst(starts: list[Start], group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of some collectives that start at once, until all end; slowest rank."""
    synchronize(device)
    begin = time.perf_counter()
    for works in [start() for start in starts]:
        for work in works:
            work.wait()
    synchronize(device)
    return agreed(time.perf_counter() - begin, group, device)


def _sample(
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
    counts. Messages of more than two ranks overlap: see :func:`_in_flight`.
    """
    start, wire = _collective(kind, group, size_bytes, device)
    warm = _burst([start], group, device)  # sets up connections
    first = _burst([start], group, device)
    repeats = min(25, max(least, int((budget_seconds - warm) / max(first, 1e-6))))
    if size_bytes <= _SMALL_ENOUGH_BYTES:
        times = [first, *(_burst([start], group, device) for _ in range(repeats - 1))]
        return Sample(wire, min(times)), warm + sum(times)
    if repeats == 1:
        return Sample(wire, first), warm + first
    took = _stream(start, repeats, group, device, _in_flight(kind, group, device))
    return Sample(wire, took), warm + first + (repeats + 1) * took


def _stream(
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


def _in_flight(kind: str, group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives a schedule has in flight while the network is busy.

    Messages of a rank to several others share its link, some end later than others, and the next
    collective uses what is free meanwhile. One at a time takes a third longer on four hosts. Three
    are as fast as the link.
    """
    messages = kind in ("all_gather", "all_to_all") and group_uses_p2p(group, device)
    return 3 if messages and dist.get_world_size(group) > 2 else 1


def _busy_seconds_per_byte(
    kind: str,
    size_bytes: int,
    seconds: float,
    rate: LinkRate,
    group: dist.ProcessGroup,
    device: torch.device,
    budget_seconds: float,
) -> float:
    """Compute overhead per wire byte of a collective, without ``start_seconds``; slowest rank.

    On a CPU it is processor time, which other programs on the machine hardly change. Elsewhere it
    is the delay of matrix products: these are timed in turns alone and beside collectives, and the
    lower quartile of each counts. The products take 1.5 times the collectives' seconds, because
    collectives are slower beside them, and must end before the products do.

    ``seconds``: of one collective of ``size_bytes``. If it is long, smaller ones run, with seconds
    by ``rate``.
    """
    if device.type == "cpu":
        start, sent_bytes = _collective(kind, group, size_bytes, device)
        each = agreed(_processor_seconds(start, _LARGE_REPEATS), group, device)
        return max(0.0, each - rate.start_seconds) / sent_bytes
    fixed = min(rate.latency_seconds, seconds)
    while seconds > 2 * _BESIDE_SECONDS and size_bytes > _FIRST_BYTES:
        size_bytes //= 4
        seconds = fixed + (seconds - fixed) / 4
    count = min(_IN_FLIGHT, max(1, math.ceil(_BESIDE_SECONDS / seconds)))
    made = [_collective(kind, group, size_bytes, device) for _ in range(count)]
    sent_bytes = sum(wire for _, wire in made)
    product = _product(device)
    one = agreed(statistics.median_high([product(1) for _ in range(5)]), group, device)
    products = max(1, math.ceil(1.5 * count * seconds / one))
    # Alone takes 1.5 and beside about 2.5 times the collectives' seconds.
    pairs = min(31, max(5, int(budget_seconds / (4 * count * seconds))))
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(pairs):
        agreed(0.0, group, device)  # all start together
        alone.append(product(products))
        agreed(0.0, group, device)
        begin = time.perf_counter()
        started = [start() for start, _ in made]
        starting = time.perf_counter() - begin
        beside.append(starting + product(products))
        for works in started:
            for work in works:
                work.wait()
        synchronize(device)
    longer = sorted(beside)[pairs // 4] - sorted(alone)[pairs // 4]
    longer -= count * rate.start_seconds
    return max(0.0, agreed(longer, group, device)) / sent_bytes


def _wake_seconds(kind: str, fit: Fit, group: dist.ProcessGroup, device: torch.device) -> float:
    """Start delay: how much later a collective ends beside computing than alone.

    Runs matrix products for the collective's seconds alone, then waits for it. The median over
    repeats, of the slowest rank; zero if the collective has ended before the products.
    """
    size_bytes = _WAKE_BYTES
    world = dist.get_world_size(group)

    def alone(size_bytes: int) -> float:
        sent_bytes = wire_bytes(kind, size_bytes, world)
        return fit.latency_seconds + sent_bytes * fit.seconds_per_byte

    while alone(size_bytes) > _BESIDE_SECONDS and size_bytes > _FIRST_BYTES:
        size_bytes //= 4
    alone_seconds = alone(size_bytes)
    start, _ = _collective(kind, group, size_bytes, device)
    product = _product(device)
    one = agreed(statistics.median_high([product(1) for _ in range(5)]), group, device)
    products = max(1, int(alone_seconds / one))
    late: list[float] = []
    for _ in range(_WAKE_REPEATS):
        agreed(0.0, group, device)  # all start together
        begin = time.perf_counter()
        works = start()
        product(products)
        computed = time.perf_counter()
        for work in works:
            work.wait()
        synchronize(device)
        ended = time.perf_counter()
        there = ended - computed < _THERE_SECONDS
        late.append(0.0 if there else max(0.0, ended - begin - alone_seconds))
    return agreed(statistics.median_high(late), group, device)


def _start_seconds(kind: str, group: dist.ProcessGroup, device: torch.device) -> float:
    """Compute overhead of a collective of hardly any bytes; slowest rank.

    On a CPU the processor time of all threads of this process, because the backend's threads take
    the core from the computing. Elsewhere the median seconds of the call that starts a collective.
    """
    start, _ = _collective(kind, group, _SMALL_BYTES, device)
    if device.type == "cpu":
        return agreed(_processor_seconds(start, _START_REPEATS), group, device)
    times: list[float] = []
    for _ in range(7):
        begin = time.perf_counter()
        works = start()
        times.append(time.perf_counter() - begin)
        for work in works:
            work.wait()
    return agreed(statistics.median_high(times), group, device)


def _processor_seconds(start: Start, count: int) -> float:
    """Mean processor seconds of this process for a collective, over ``count`` in sequence."""
    begin = time.process_time()
    for _ in range(count):
        for work in start():
            work.wait()
    return (time.process_time() - begin) / count


def _product(device: torch.device) -> Callable[[int], float]:
    """A function that multiplies matrices ``times`` times and returns the seconds."""
    size = 256 if device.type == "cpu" else 2048
    a, b, out = (torch.ones(size, size, device=device) for _ in range(3))

    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # not NCCL's stream
        return time.perf_counter() - begin

    run(1)
    return run
