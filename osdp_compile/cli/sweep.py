"""``osdp sweep``: find what bounds a model's training over ranks, bandwidths, memory, lengths."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from osdp_compile.cli.argument_types import prepare_file
from osdp_compile.cli.model_arguments import exit_status, given_model, working
from osdp_compile.planning.offline import mesh_sizes
from osdp_compile.planning.sweep import Grid, sweep
from osdp_compile.planning.traced_step import TracedStep
from osdp_compile.reports.sweep_plot import check_picture, draw_sweep
from osdp_compile.reports.sweep_table import EXPLAINED, points_table, write_csv


def run(given: argparse.Namespace) -> int:
    """Plan and print; the exit status."""
    return exit_status("osdp sweep", lambda console: _run(given, console))


def _run(given: argparse.Namespace, console: Console) -> None:
    lengths, batches = given.sequence_lengths, given.batch_sizes
    checked = given_model(given, batches is not None, lengths is not None)
    grid = Grid(
        meshes=_meshes(given),
        bandwidths=_ascending(given.bandwidths),
        limits=_ascending(given.memory_limits),
        lengths=_ascending(lengths or (checked.length,)),
        batches=_ascending(batches or (checked.batch,)),
    )
    # Report missing packages and unwritable files before planning.
    if given.picture is not None:
        check_picture(given.picture)
    for path in (given.csv, given.picture):
        if path is not None and (failure := prepare_file(path)):
            raise ValueError(failure)
    operators: dict[str, None] = {}

    def traced(batch: int | None, length: int | None) -> TracedStep:
        step = checked.traced(batch, length)
        operators[step.operators] = None
        return step

    with working("osdp sweep", "tracing") as say:
        points = sweep(traced, grid, checked.hardware, say)
    title = f"{given.model or given.hf_config} on {checked.hardware.name}"
    console.print(points_table(points, title))
    console.print(EXPLAINED, markup=False)
    if checked.hardware.device_type == "cuda":
        for one in operators:
            console.print(one, markup=False)
    if given.csv is not None:
        write_csv(points, given.csv)
        console.print(f"Saved in {given.csv}", markup=False)
    if given.picture is not None:
        draw_sweep(points, given.picture, title)
        console.print(f"Drawn in {given.picture}", markup=False)


def _meshes(given: argparse.Namespace) -> tuple[Mapping[str, int], ...]:
    if (given.world_sizes is None) == (given.mesh is None):
        raise ValueError("give --world-sizes, or --mesh once or more, and not both")
    if given.mesh is not None:
        once = {tuple(mesh.items()): mesh_sizes(None, mesh) for mesh in given.mesh}
        return tuple(once.values())
    return tuple(mesh_sizes(size, None) for size in _ascending(given.world_sizes))


def _ascending(values: Sequence[Any]) -> tuple[Any, ...]:
    """The distinct values in ascending order; a single value may be None."""
    return tuple(sorted(set(values)))
