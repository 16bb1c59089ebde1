"""Collective times: measured latency, bandwidth and compute overhead of a group's collectives.

Two forms: :func:`quick_link` for the first call, from a small and a large message, and
:func:`swept_link` for ``osdp calibrate``, from a sweep over sizes.

Every function here is collective, as those of :mod:`osdp_compile.calibration.timed_collectives`.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from osdp_compile.calibration import timed_collectives
from osdp_compile.calibration.compute_overhead import (
    delay_seconds,
    overhead_seconds_per_byte,
    start_seconds_of,
)
from osdp_compile.calibration.line_fit import Fit, Sample, fit_line
from osdp_compile.calibration.timed_collectives import (
    FIRST_BYTES,
    SMALL_BYTES,
    in_flight_of,
    most_bytes_of,
    sample_of,
    stream,
)
from osdp_compile.runtime.collectives import Group, backend_of
from osdp_compile.runtime.p2p import group_uses_p2p
from passes.types.hardware import Hardware, LinkRate, wire_bytes

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
#: Check of a cached profile: predicted seconds of its collective, number of tries, and the factor
#: between measured and predicted seconds that means another network.
_CHECK_SECONDS, _CHECKS, _OTHER_NETWORK = 0.02, 3, 2.0


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
    small, _ = sample_of(kind, SMALL_BYTES, group, device, budget_seconds / 4, least=7)
    size_bytes, most_bytes = FIRST_BYTES, most_bytes_of(scratch_bytes, device)
    while True:
        large, _ = sample_of(kind, size_bytes, group, device, 0.0)
        if large.seconds >= budget_seconds / 4 or 4 * size_bytes > most_bytes:
            break
        size_bytes *= 4
    # An outlier among seven times is in two of six pairs, so it does not change the median.
    large, _ = sample_of(kind, size_bytes, group, device, 2 * budget_seconds, least=7)
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
        return overhead_seconds_per_byte(
            kind, full_bytes, last.seconds, links[kind].rate, group, device, budget_seconds
        )

    one = _one_for_all(group, device)
    wake = delay_seconds(one, links[one].fit, group, device)
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
    size_bytes, most_bytes = FIRST_BYTES, most_bytes_of(scratch_bytes, device)
    while (
        hardware.collective_seconds(kind, size_bytes, world) < _CHECK_SECONDS
        and 4 * size_bytes <= most_bytes
    ):
        size_bytes *= 4
    said_seconds = hardware.collective_seconds(kind, size_bytes, world)
    start, _ = timed_collectives.collective(kind, group, size_bytes, device)
    for _ in range(_CHECKS):
        seconds = stream(start, 3, group, device, in_flight_of(kind, group, device))
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
    most_bytes = most_bytes_of(scratch_bytes, device)
    sizes = [SMALL_BYTES * 4**i for i in range(8) if SMALL_BYTES * 4**i <= most_bytes]
    samples: list[Sample] = []
    left_seconds = 0.7 * budget_seconds
    for index, size_bytes in enumerate(sizes):
        # The next size takes four times as long, and runs at least six times.
        if len(samples) >= 3 and 4 * 6 * samples[-1].seconds > left_seconds:
            break
        share_seconds = left_seconds / (len(sizes) - index)
        sample, spent_seconds = sample_of(kind, size_bytes, group, device, share_seconds, least=3)
        left_seconds -= spent_seconds
        samples.append(sample)
    last_bytes = sizes[len(samples) - 1]
    fit = fit_line(samples)
    rate = _fitted(kind, fit, group, device)
    busy = overhead_seconds_per_byte(
        kind, last_bytes, samples[-1].seconds, rate, group, device, 0.3 * budget_seconds
    )
    wake = delay_seconds(kind, fit, group, device)
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
        start_seconds=start_seconds_of(kind, group, device),
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
