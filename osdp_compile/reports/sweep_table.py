"""Sweep table: the points of a sweep as a printed table and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from osdp_compile.planning.sweep import NOTICEABLE, Bound, Point, Reached
from passes.types.units import format_bytes, format_limit, format_seconds, is_decimal

EXPLAINED = (
    "used: share of the profile's FLOP/s for matrix products. FSDP: all sharded and regathered. "
    "gain: throughput over FSDP's.\n"
    "After '>': nothing fits; the figure is the least feasible limit.\n"
    "Bound by memory: more throughput without a limit. Else by bandwidth: the same plan has more "
    "throughput if bytes take no time. Else by latency: it still has exposed communication. "
    f"Else by compute. Each by more than {NOTICEABLE:.0%}."
)
_STYLES = {
    Bound.MEMORY: "red",
    Bound.BANDWIDTH: "yellow",
    Bound.LATENCY: "magenta",
    Bound.COMPUTE: "green",
}


def ranks_text(sizes: Iterable[int]) -> str:
    """The number of ranks, or the sizes of the mesh dimensions: ``8x8``."""
    return "x".join(map(str, sizes))


def limit_text(limit_bytes: int | None) -> str:
    """A limit as people write it: ``80 GB``, not 74.51 GiB."""
    return "none" if limit_bytes is None else format_limit(limit_bytes)


def least_text(point: Point, least_bytes: int | None) -> str:
    """The least feasible limit, rounded up, in powers of 1000 if the point's limit is."""
    assert least_bytes is not None and point.limit_bytes is not None
    return format_bytes(least_bytes, is_decimal(point.limit_bytes), round_up=True)


def points_table(points: Sequence[Point], title: str) -> Table:
    """One row for each point; a column without any value is left out."""
    # Narrow, for a dozen columns on one screen.
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    shown: dict[str, list[str | Text]] = {}
    for point in points:
        for head, cell in _cells(point).items():
            shown.setdefault(head, []).append(cell)
    shown = {head: cells for head, cells in shown.items() if any(map(str, cells))}
    for head in shown:
        table.add_column(head, justify="left" if head == "bound by" else "right", no_wrap=True)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def _cells(point: Point) -> dict[str, str | Text]:
    best, fsdp = point.best, point.fsdp
    tokens, samples = point.tokens_per_second(best), point.samples_per_second(best)
    return {
        "ranks": ranks_text(point.ranks.values()),
        "network": f"{point.bandwidth:g}x",
        "limit": limit_text(point.limit_bytes),
        "length": "" if point.length is None else str(point.length),
        "batch": "" if best is None or best.batch is None else str(best.batch),
        "step": "" if best is None else format_seconds(best.said.step_seconds),
        "tokens/s": "" if tokens is None else f"{tokens:,.0f}",
        "samples/s": "" if samples is None or tokens is not None else f"{samples:,.1f}",
        "used": "" if best is None else f"{best.utilisation:.1%}",
        "peak": (
            f"> {least_text(point, point.least_bytes)}"
            if best is None
            else format_bytes(best.said.peak_bytes)
        ),
        "FSDP used": (
            f"> {least_text(point, point.fsdp_least_bytes)}"
            if fsdp is None
            else f"{fsdp.utilisation:.1%}"
        ),
        "gain": "" if point.times_fsdp is None else f"{point.times_fsdp:.2f}x",
        "bound by": Text(point.bound.value, _STYLES[point.bound]),
    }


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Write one line for each point, in raw units; a missing figure is empty."""
    rows = [_row(point) for point in points]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _row(point: Point) -> dict[str, Any]:
    return {
        "world_size": point.world_size,
        "mesh": ",".join(f"{name}={size}" for name, size in point.ranks.items()),
        "bandwidth_factor": point.bandwidth,
        "memory_limit_bytes": point.limit_bytes,
        "sequence_length": point.length,
        "bound": point.bound.value,
        **_columns(point, point.best, ""),
        "least_bytes": point.least_bytes,
        "throughput_factor_without_limit": point.without_limit,
        "throughput_factor_without_transfer": point.without_bandwidth,
        **_columns(point, point.fsdp, "fsdp_"),
        "fsdp_least_bytes": point.fsdp_least_bytes,
        "throughput_factor_over_fsdp": point.times_fsdp,
    }


def _columns(point: Point, reached: Reached | None, prefix: str) -> dict[str, Any]:
    said = None if reached is None else reached.said
    return {
        f"{prefix}fits": reached is not None,
        f"{prefix}batch_size": None if reached is None else reached.batch,
        f"{prefix}step_seconds": None if said is None else said.step_seconds,
        f"{prefix}exposed_seconds": None if said is None else said.exposed_seconds,
        f"{prefix}peak_bytes": None if said is None else said.peak_bytes,
        f"{prefix}samples_per_second": point.samples_per_second(reached),
        f"{prefix}tokens_per_second": point.tokens_per_second(reached),
        f"{prefix}utilisation": None if reached is None else reached.utilisation,
    }
