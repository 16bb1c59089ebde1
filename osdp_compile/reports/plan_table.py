"""Plan table: print a plan; equal layers share a row, so a deep model fits on one screen."""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from osdp_compile.log_lines import ensure_visible
from osdp_compile.reports.alike_layers import grouped, grouped_names, joined, ranged
from passes.ops.slicing import parameter_of
from passes.types.decision import Moves
from passes.types.plan import ParameterPlan, Plan
from passes.types.units import format_bytes, format_limit, format_ranks, format_seconds


def plan_table(plan: Plan) -> Table:
    """The plan as a table: parameter, shape, decision, bytes saved, reason.

    Parameters that differ only in a layer's number share one row: ``blocks.{0..11}.up.weight``.
    The row's bytes are their sum, its seconds their range.
    """
    table = Table(title=_title(plan), title_justify="left", header_style="bold")
    table.add_column("parameter", overflow="fold")
    table.add_column("shape")
    table.add_column("decision")
    table.add_column("saves", justify="right")
    table.add_column("why", overflow="fold")
    for rows in grouped(plan.parameters):
        first = rows[0]
        saved = sum(row.saved_bytes for row in rows)
        table.add_row(
            Text(joined([row.name for row in rows])),  # Text: rich parses brackets in a str
            shape_text(first.shape),
            decided(first),
            format_bytes(saved) if saved else "",
            Text(ranged([row.reason for row in rows])),
        )
    return table


def _title(plan: Plan) -> str:
    limit = plan.memory_limit_bytes
    return f"osdp plan for {format_ranks(plan.world_size)}, " + (
        f"limit {format_limit(limit)}" if limit is not None else "no memory limit"
    )


def shape_text(shape: Sequence[int]) -> str:
    """The sizes of a parameter."""
    return "x".join(map(str, shape)) or "scalar"


def decided(row: ParameterPlan) -> str:
    """The text of a decision, with its slices or chunks."""
    if row.moves is Moves.ACTIVATIONS:
        within = " within host" if row.decision.within_host else ""
        kept = ", keep tokens" if row.decision.keep else ""
        chunks = f", in {row.chunks} chunks" if row.chunks > 1 else ""
        alone = ", alone" if row.alone else ""
        return f"tensor parallel{within}, along {row.dim}{alone}{kept}{chunks}"
    text = row.decision.text
    if row.slices == 1:
        return text
    kept = f", {row.kept_slices} of them kept" if row.kept_slices else ""
    return f"{text}, in {row.slices} slices{kept}"


def prediction_lines(plan: Plan) -> list[str]:
    """The simulator's prediction of the step, in two lines; empty without a prediction.

    One more line reports recomputed activations, and one the hierarchical collectives over all
    ranks.
    """
    said = plan.prediction
    if said is None:
        return []
    filling = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in said.peak.items())
    lines = [
        f"predicted step {format_seconds(said.step_seconds)}, exposed communication "
        f"{format_seconds(said.exposed_seconds)}",
        f"predicted peak {format_bytes(said.peak_bytes)} ({filling})",
    ]
    if plan.recompute:
        lines.append(
            f"recomputed in the backward: {len(plan.recompute)} tensors, saves "
            f"{format_bytes(said.recomputed_bytes)} of activations for "
            f"{format_seconds(said.recomputed_seconds)}: "
            + ", ".join(map(joined, grouped_names(plan.recompute)))
        )
    stages = [
        one.stage
        for order in plan.order.values()
        for one in order
        if not ((name := parameter_of(one.names[0])) in plan and plan.decision(name).within_host)
    ]
    if 1 in stages:
        lines.append(
            f"{stages.count(1)} of {stages.count(0)} collectives over all ranks are hierarchical"
        )
    return lines


def plan_text(plan: Plan, width: int | None = None) -> str:
    """The table and the prediction as plain text.

    ``width``: in columns (None: that of the terminal, or 120 without a terminal).
    """
    return plain_text(plan_table(plan), *map(Text, prediction_lines(plan)), width=width)


def plain_text(*parts: RenderableType, width: int | None = None) -> str:
    """The output of rich for these parts in sequence, without colours.

    ``width``: in columns (None: that of the terminal, or 120 without a terminal).
    """
    columns = width or shutil.get_terminal_size(fallback=(120, 24)).columns
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    for part in parts:
        console.print(part)
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def plan_line(plan: Plan) -> str:
    """The plan in one line: how many parameters are sharded, and the prediction."""
    sharded = sum(row.decision.sharded for row in plan.parameters)
    line = f"{_title(plan)}: {sharded} of {len(plan.parameters)} parameters sharded"
    said = plan.prediction
    if said is None:
        return line
    return (
        f"{line}, predicted step {format_seconds(said.step_seconds)}, exposed communication "
        f"{format_seconds(said.exposed_seconds)}, peak {format_bytes(said.peak_bytes)}"
    )


def log_plan(plan: Plan, log: logging.Logger, in_one_line: bool = False) -> None:
    """Log the plan once, at INFO.

    If the program has not configured logging, the logger gets a handler for standard error.

    Args:
        in_one_line: one line at INFO, and the table at DEBUG.
    """
    ensure_visible(log)
    if not in_one_line:
        log.info("%s", plan_text(plan))
        return
    log.info("%s", plan_line(plan))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", plan_text(plan))


def shortened(label: str, shown: int = 2) -> str:
    """A label with the first names and the number of others: a bucket may have a hundred."""
    names = label.split("+")
    if len(names) <= shown + 1:
        return label
    return f"{'+'.join(names[:shown])} and {len(names) - shown} more"
