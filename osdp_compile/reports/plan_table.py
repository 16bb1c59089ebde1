"""Plan table: print a plan; equal layers share a row, so a deep model fits on one screen."""

from __future__ import annotations

import io
import itertools
import logging
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from osdp_compile.log_lines import ensure_visible
from passes.ops.slicing import parameter_of
from passes.types.decision import Moves
from passes.types.plan import ParameterPlan, Plan
from passes.types.units import format_bytes, format_limit, format_ranks, format_seconds


def plan_table(plan: Plan) -> Table:
    """The plan as a table: parameter, shape, decision, bytes saved, reason.

    Parameters that differ only in a layer's number share one row: ``blocks.{0..11}.up.weight``.
    The row's bytes are their sum, its seconds their range.
    """
    limit = plan.memory_limit_bytes
    title = f"osdp plan for {format_ranks(plan.world_size)}, " + (
        f"limit {format_limit(limit)}" if limit is not None else "no memory limit"
    )
    table = Table(title=title, title_justify="left", header_style="bold")
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
            shape_text(first),
            decided(first),
            format_bytes(saved) if saved else "",
            Text(ranged([row.reason for row in rows])),
        )
    return table


def shape_text(row: ParameterPlan) -> str:
    """The sizes of a parameter."""
    return "x".join(map(str, row.shape)) or "scalar"


def decided(row: ParameterPlan) -> str:
    """The text of a decision, with its slices."""
    if row.moves is Moves.ACTIVATIONS:
        return f"tensor parallel, along {row.dim}"
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
            + ", ".join(map(joined, _keys_grouped(plan.recompute)))
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


def log_plan(plan: Plan, log: logging.Logger) -> None:
    """Log the plan once, at INFO.

    If the program has not configured logging, the logger gets a handler for standard error.
    """
    ensure_visible(log)
    log.info("%s", plan_text(plan))


def shortened(label: str, shown: int = 2) -> str:
    """A label with the first names and the number of others: a bucket may have a hundred."""
    names = label.split("+")
    if len(names) <= shown + 1:
        return label
    return f"{'+'.join(names[:shown])} and {len(names) - shown} more"


_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:])")
_Row = TypeVar("_Row", ParameterPlan, str)


def grouped(rows: Sequence[ParameterPlan]) -> Iterable[list[ParameterPlan]]:
    """Groups of rows that differ only in a layer's number, in the order of their first rows."""
    groups: dict[tuple[object, ...], list[ParameterPlan]] = {}
    for row in rows:
        pattern = _NUMBER.sub("*", row.name)
        key = pattern, row.shape, row.decision, row.moves, row.dim, row.slices, row.kept_slices
        groups.setdefault((*key, _kind(row.reason)), []).append(row)
    for group in groups.values():
        yield from _grids(group)


def _keys_grouped(keys: Sequence[str]) -> Iterable[list[str]]:
    """Groups of recomputed tensors that differ only in a layer's number."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(_NUMBER.sub("*", key), []).append(key)
    for group in groups.values():
        yield from _grids(group)


def _grids(rows: list[_Row]) -> Iterable[list[_Row]]:
    """Split rows into groups whose names have every combination of their numbers.

    Only then a name with ranges covers exactly these rows.
    """
    numbers = [_NUMBER.findall(row if isinstance(row, str) else row.name) for row in rows]
    spans = [len(set(column)) for column in zip(*numbers, strict=True)]
    if math.prod(spans) == len(rows):
        yield rows
        return
    varies = next(index for index, span in enumerate(spans) if span > 1)
    parts: dict[str, list[_Row]] = {}
    for row, own in zip(rows, numbers, strict=True):
        parts.setdefault(own[varies], []).append(row)
    for part in parts.values():
        yield from _grids(part)


_SECONDS = re.compile(r"[\d.]+ (?:s|ms|us)\b")
_IN_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _kind(reason: str) -> str:
    """A reason without its seconds: equal layers differ in microseconds."""
    return _SECONDS.sub("", reason)


def ranged(reasons: Sequence[str]) -> str:
    """One text for reasons of one kind, each figure as a range: ``2.1 to 2.7 ms``."""
    columns = zip(*(_SECONDS.findall(reason) for reason in reasons), strict=True)
    parts = (_range(sorted(set(column), key=_seconds)) for column in columns)
    return _SECONDS.sub(lambda _: next(parts), reasons[0])


def _seconds(figure: str) -> float:
    number, unit = figure.split()
    return float(number) * _IN_SECONDS[unit]


def _range(figures: list[str]) -> str:
    least, most = figures[0], figures[-1]
    if least == most:
        return least
    if least.split()[1] == most.split()[1]:
        least = least.split()[0]
    return f"{least} to {most}"


def joined(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    numbers = [_NUMBER.findall(name) for name in names]
    columns = list(zip(*numbers, strict=True))
    parts = iter(_span(sorted(set(map(int, column)))) for column in columns)
    return _NUMBER.sub(lambda _: next(parts), names[0])


def _span(numbers: list[int]) -> str:
    """Numbers as ``{0..3}``, with gaps ``{0,2,5..9}``, or one number by itself."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    least = 2 if len(runs) == 1 else 3
    parts = ([f"{run[0]}..{run[-1]}"] if len(run) >= least else map(str, run) for run in runs)
    return "{" + ",".join(itertools.chain(*parts)) + "}"
