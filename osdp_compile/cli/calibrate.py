"""``osdp calibrate``: measure this machine and its network.

Runs on every rank; rank 0 alone prints and writes.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from osdp_compile.calibration.calibrate import Calibration, calibrate
from osdp_compile.cli.argument_types import prepare_file
from passes.types.hardware import Hardware
from passes.types.units import format_bytes, format_seconds


def run(given: argparse.Namespace) -> int:
    """Measure, print and save; the exit status."""
    device = torch.device("cpu")
    if given.device == "cuda" or (given.device is None and torch.cuda.is_available()):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    with _process_group(device) as group:
        first = group is None or dist.get_rank(group) == 0
        # Check the path before the measurement.
        failure = _unfit_mesh(given.mesh, group) or (prepare_file(given.out) if first else "")
        if group is not None:
            shared = [failure]
            dist.broadcast_object_list(shared, src=0, group=group)
            failure = shared[0]
        console = Console(stderr=True, quiet=not first)
        if failure:
            console.print(f"osdp calibrate: {failure}", style="red", markup=False)
            return 1
        found = _measured(group, device, given, console)
        if first:
            found.hardware.save(given.out)
            _print(found, given.out)
    return 0


@contextmanager
def _process_group(device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """The process group of torchrun's environment; None without torchrun."""
    if "RANK" not in os.environ:
        yield None
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _measured(
    group: dist.ProcessGroup | None,
    device: torch.device,
    given: argparse.Namespace,
    console: Console,
) -> Calibration:
    along: dict[str, dist.ProcessGroup] = {}
    if given.mesh:
        names = tuple(given.mesh)
        mesh = init_device_mesh(device.type, tuple(given.mesh.values()), mesh_dim_names=names)
        along = {name: mesh.get_group(name) for name in names}
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        return calibrate(
            group,
            device,
            given.seconds,
            given.memory,
            progress=lambda what, done: bar.update(task, description=what, completed=done),
            along=along,
        )


def _print(found: Calibration, out: Path) -> None:
    """Print the results as tables on standard output."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:  # ignore the default of 80 columns
        console.width = max(console.width, 120)
    hardware = found.hardware
    console.print(_device_table(hardware))
    if found.links:
        console.print(_link_table(found))
        console.print(
            "error: of latency + bytes / bandwidth against the measured times, median and worst, "
            f"for {format_bytes(min(_sizes(found)))} to {format_bytes(max(_sizes(found)))} "
            "that a rank sends.\n"
            "start: compute overhead of each collective, at any size.\n"
            "overhead: compute overhead of the bytes sent beside it.\n"
            "delay: later end of a collective that starts beside compute."
        )
    else:
        console.print(
            "One process: no collectives were measured, and the profile holds none. "
            "Start it with torchrun to measure them."
        )
    console.print(f"Written to {out}. To use it: options={{'hardware': '{out}'}}", markup=False)


def _device_table(hardware: Hardware) -> Table:
    table = Table(title=hardware.name, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for dtype, rate in hardware.flops_per_second.items():
        if dtype != "default":
            table.add_row(f"{dtype} products", f"{rate / 1e9:,.1f} GFLOP/s")
    table.add_row("memory bandwidth", f"{format_bytes(hardware.memory_bytes_per_second)}/s")
    table.add_row("launch of a kernel", format_seconds(hardware.launch_seconds))
    if hardware.memory_bytes:
        table.add_row("memory", format_bytes(hardware.memory_bytes))
    return table


def _link_table(found: Calibration) -> Table:
    table = Table()
    if len(found.links) > 1:
        table.add_column("along")
    table.add_column("collective")
    for title in ("latency", "bandwidth", "start", "overhead", "delay"):
        table.add_column(title, justify="right")
    table.add_column("algorithm")
    table.add_column("error", justify="right")
    rows = [(name, *item) for name, kinds in found.links.items() for item in kinds.items()]
    for name, kind, link in rows:
        rate = link.rate
        table.add_row(
            *([name or "all ranks"] if len(found.links) > 1 else []),
            kind,
            format_seconds(rate.latency_seconds),
            f"{format_bytes(1 / rate.seconds_per_byte)}/s",
            format_seconds(rate.start_seconds),
            f"{format_seconds(rate.overhead_seconds_per_byte * 2**20)}/MiB",
            format_seconds(rate.start_delay_seconds),
            rate.carried_out,
            f"{link.fit.median_error:.0%}, {link.fit.worst_error:.0%}",
        )
    return table


def _sizes(found: Calibration) -> list[int]:
    links = [link for kinds in found.links.values() for link in kinds.values()]
    return [sample.wire_bytes for link in links for sample in link.samples]


def _unfit_mesh(sizes: dict[str, int], group: dist.ProcessGroup | None) -> str:
    """An error text if the mesh does not match the number of ranks, or ""."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if sizes and math.prod(sizes.values()) != ranks:
        asked = " x ".join(str(size) for size in sizes.values())
        return f"--mesh is {asked} ranks, and there are {ranks}"
    return ""
