"""Compute overhead: the time that collectives take from computing, and their start delay beside it.

Every function here is collective, as those of :mod:`osdp_compile.calibration.timed_collectives`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from osdp_compile.calibration import timed_collectives
from osdp_compile.calibration.line_fit import Fit
from osdp_compile.calibration.timed_collectives import (
    FIRST_BYTES,
    IN_FLIGHT,
    SMALL_BYTES,
    Start,
    agreed,
    synchronize,
)
from passes.types.hardware import LinkRate, wire_bytes

#: Duration of collectives beside timed computing: this, or up to twice this.
_BESIDE_SECONDS = 0.02
#: Size of a large message of a training step, and repeats of the start delay measurement.
_WAKE_BYTES, _WAKE_REPEATS = 1 << 22, 11
#: Repeats for the compute overhead: of small collectives for ``start_seconds``, of large ones for
#: the overhead per byte.
_START_REPEATS, _LARGE_REPEATS = 20, 3
#: Longest wait for a collective that has ended already.
_THERE_SECONDS = 2e-4


def overhead_seconds_per_byte(
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
        start, sent_bytes = timed_collectives.collective(kind, group, size_bytes, device)
        each = agreed(_processor_seconds(start, _LARGE_REPEATS), group, device)
        return max(0.0, each - rate.start_seconds) / sent_bytes
    fixed = min(rate.latency_seconds, seconds)
    while seconds > 2 * _BESIDE_SECONDS and size_bytes > FIRST_BYTES:
        size_bytes //= 4
        seconds = fixed + (seconds - fixed) / 4
    count = min(IN_FLIGHT, max(1, math.ceil(_BESIDE_SECONDS / seconds)))
    made = [timed_collectives.collective(kind, group, size_bytes, device) for _ in range(count)]
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


def delay_seconds(kind: str, fit: Fit, group: dist.ProcessGroup, device: torch.device) -> float:
    """Start delay: how much later a collective ends beside computing than alone.

    Runs matrix products for the collective's seconds alone, then waits for it. The median over
    repeats, of the slowest rank; zero if the collective has ended before the products.
    """
    size_bytes = _WAKE_BYTES
    world = dist.get_world_size(group)

    def alone(size_bytes: int) -> float:
        sent_bytes = wire_bytes(kind, size_bytes, world)
        return fit.latency_seconds + sent_bytes * fit.seconds_per_byte

    while alone(size_bytes) > _BESIDE_SECONDS and size_bytes > FIRST_BYTES:
        size_bytes //= 4
    alone_seconds = alone(size_bytes)
    start, _ = timed_collectives.collective(kind, group, size_bytes, device)
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


def start_seconds_of(kind: str, group: dist.ProcessGroup, device: torch.device) -> float:
    """Compute overhead of a collective of hardly any bytes; slowest rank.

    On a CPU the processor time of all threads of this process, because the backend's threads take
    the core from the computing. Elsewhere the median seconds of the call that starts a collective.
    """
    start, _ = timed_collectives.collective(kind, group, SMALL_BYTES, device)
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
