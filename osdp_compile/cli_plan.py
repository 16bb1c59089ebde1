"""``osdp plan``: a plan for a model and a cluster that need not be here, and what it gains."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from osdp_compile.batch_search import Tried, best_batch
from osdp_compile.cli_values import bytes_of, mesh_of
from osdp_compile.errors import OsdpError
from osdp_compile.figures import new_figure
from osdp_compile.frontier import Frontier, frontier
from osdp_compile.hf_models import causal_lm
from osdp_compile.offline import mesh_sizes
from osdp_compile.options import Options
from osdp_compile.plan_table import plan_text
from osdp_compile.traced_step import TracedStep, trace
from passes.decisions import Decision, Plan
from passes.presets import PRESETS
from passes.units import format_bytes, format_seconds

#: What people compare with, by what they call it.
ALTERNATIVES = {
    "DDP: replicate all": Decision.REPLICATE,
    "ZeRO-2: shard all, keep": Decision.SHARD_KEEP,
    "FSDP: shard all, gather again": Decision.SHARD_AGAIN,
}
#: A model, and what it is called with in training.
Made = tuple[torch.nn.Module, Sequence[Any], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``osdp plan`` takes."""
    parser.description = (
        "Plan a model for a cluster that need not be here: nothing is allocated, no process "
        "group is started. MODULE:FUNCTION returns (model, args) or (model, args, kwargs), what "
        "one rank calls the model with in training; it is called with torch's default device set "
        "to meta, and with the batch size where it takes an argument."
    )
    parser.add_argument("model", nargs="?", metavar="MODULE:FUNCTION", help="makes the model")
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="in its place: a folder with a Hugging Face config.json, of a causal language model",
    )
    parser.add_argument("--batch-size", type=_count, help="of a rank (with --hf-config: 1)")
    parser.add_argument(
        "--sequence-length", type=_count, default=2048, help="with --hf-config (default: 2048)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of the parameters, with --hf-config (default: bfloat16)",
    )
    parser.add_argument("--world-size", type=_count, metavar="RANKS")
    parser.add_argument(
        "--mesh",
        type=mesh_of,
        metavar="NAME=RANKS,...",
        help="in place of --world-size: ranks along two dimensions, the outer first, such as "
        "host=8,gpu=8",
    )
    parser.add_argument(
        "--hardware",
        required=True,
        help=f"a profile that osdp calibrate wrote, or one of {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--memory-limit", type=bytes_of, metavar="BYTES", help="of a rank, as 80GB (default: none)"
    )
    parser.add_argument(
        "--optimizer", default="adamw", help="its name, or bytes of state for each element"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the plan as JSON")
    parser.add_argument(
        "--batch-sizes",
        type=_batch_sizes,
        metavar="1,2,4|auto",
        help="find the batch size of a rank with the highest throughput under the limit",
    )
    parser.add_argument(
        "--frontier",
        type=Path,
        metavar="PNG",
        help="also step time against memory, as a table and as this picture",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Plan and print; the exit status."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:  # nor are its 80 columns
        console.width = max(console.width, 120)
    try:
        _run(given, console)
    except (OsdpError, ValueError, OSError, ImportError) as error:
        Console(stderr=True).print(f"osdp plan: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def _run(given: argparse.Namespace, console: Console) -> None:
    optimizer = int(given.optimizer) if given.optimizer.isdigit() else given.optimizer
    checked = Options.parse({"hardware": given.hardware, "optimizer": optimizer})
    assert checked.hardware is not None
    ranks = mesh_sizes(given.world_size, given.mesh)
    hardware, limit_bytes = checked.hardware, given.memory_limit
    make = _maker(given)
    if given.frontier is not None:
        new_figure("--frontier", 1, 1)  # what is missing is said now, and not after planning

    def traced(batch: int | None) -> TracedStep:
        model, args, kwargs = make(batch)
        return trace(model, args, kwargs, optimizer=optimizer)

    with _working("tracing") as say:
        if given.batch_sizes is not None:
            tried = best_batch(traced, given.batch_sizes, ranks, hardware, limit_bytes, say)
            console.print(_batch_table(tried))
            best = max(tried, key=lambda one: one.samples_per_second)
            assert best.plan is not None
            step, found = best.step, best.plan
        else:
            step = traced(given.batch_size)
            say("planning")
            found = step.plan(ranks, hardware, limit_bytes)
        say("pricing the alternatives")
        others = {
            name: step.uniform(decision, ranks, hardware) for name, decision in ALTERNATIVES.items()
        }
        say("looking at other limits")
        curve = frontier(step, ranks, hardware, say) if given.frontier is not None else None
    print(plan_text(found))
    console.print(_comparison(found, others, limit_bytes))
    if curve is not None:
        console.print(_frontier_table(curve))
        curve.draw(given.frontier, others)
        console.print(f"Drawn in {given.frontier}", markup=False)
    if given.out is not None:
        found.save(given.out)
        console.print(f"Saved. To use it: options={{'plan': '{given.out}'}}", markup=False)


def _maker(given: argparse.Namespace) -> Callable[[int | None], Made]:
    """What makes the model and its arguments, for a batch size."""
    if (given.model is None) == (given.hf_config is None):
        raise ValueError("give MODULE:FUNCTION, or --hf-config, and not both")
    if given.hf_config is not None:
        dtype = getattr(torch, given.dtype)
        return lambda batch: causal_lm(given.hf_config, batch or 1, given.sequence_length, dtype)
    module_name, colon, name = given.model.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{given.model!r} is not like MODULE:FUNCTION, as train:model_and_batch")
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{given.model}: {error}") from error
    takes_batch = bool(inspect.signature(function).parameters)
    if not takes_batch and (given.batch_size or given.batch_sizes is not None):
        raise ValueError(f"{given.model} takes no batch size: give it an argument for it")

    def make(batch: int | None) -> Made:
        with torch.device("meta"):
            made = function(batch or 1) if takes_batch else function()
        if not (isinstance(made, tuple) and len(made) in (2, 3)):
            raise ValueError(f"{given.model} returned no (model, args) or (model, args, kwargs)")
        model, args = made[:2]
        return model, args, made[2] if len(made) == 3 else {}

    return make


def _comparison(found: Plan, others: dict[str, Plan], limit_bytes: int | None) -> Table:
    """The plan beside those that people use today."""
    table = Table(title="beside one decision for all", title_justify="left")
    table.add_column("plan")
    for head in ("step", "waiting", "peak", "under the limit", "times as fast"):
        table.add_column(head, justify="right")
    ours = found.prediction
    assert ours is not None
    for name, plan in {"osdp": found, **others}.items():
        said = plan.prediction
        assert said is not None
        fits = limit_bytes is None or said.peak_bytes <= limit_bytes
        table.add_row(
            name,
            format_seconds(said.step_seconds),
            format_seconds(said.exposed_seconds),
            format_bytes(said.peak_bytes),
            "yes" if fits else "[red]no[/red]",
            "" if plan is found else f"{said.step_seconds / ours.step_seconds:.2f}",
        )
    return table


def _batch_table(tried: Sequence[Tried]) -> Table:
    table = Table(title="batch sizes of a rank", title_justify="left")
    for head in ("batch", "step", "samples a second, all ranks", "peak"):
        table.add_column(head, justify="right")
    best = max(tried, key=lambda one: one.samples_per_second)
    for one in tried:
        said = None if one.plan is None else one.plan.prediction
        table.add_row(
            str(one.batch),
            "does not fit" if said is None else format_seconds(said.step_seconds),
            "" if said is None else f"{one.samples_per_second:,.1f}",
            format_bytes(one.least_bytes if said is None else said.peak_bytes),
            style="bold" if one is best else None,
        )
    return table


def _frontier_table(curve: Frontier) -> Table:
    table = Table(title="step time against memory", title_justify="left")
    for head in ("limit", "peak", "step", "waiting"):
        table.add_column(head, justify="right")
    for limit_bytes, plan in curve.points:
        said = plan.prediction
        assert said is not None
        table.add_row(
            format_bytes(limit_bytes),
            format_bytes(said.peak_bytes),
            format_seconds(said.step_seconds),
            format_seconds(said.exposed_seconds),
        )
    return table


@contextmanager
def _working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error that says what is being done, gone at the end."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda text: progress.update(task, description=text)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _batch_sizes(text: str) -> tuple[int, ...] | None:
    """Batch sizes; empty for those that are found automatically."""
    return () if text == "auto" else tuple(_count(part) for part in text.split(","))
