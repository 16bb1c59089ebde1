"""Plan diff: the differences of two plans, as tables; alike parameters share a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from osdp_compile.reports.alike_layers import grouped_names, joined, kind_of, ranged
from osdp_compile.reports.plan_table import decided
from passes.types.plan import OF_INPUT, ParameterPlan, Plan
from passes.types.units import format_bytes, format_limit, format_ranks, format_seconds

#: In place of a value that a plan has not.
_NONE = "-"
#: The share of all elements that parameters in one row of small ones have.
_SMALL = 0.01
#: Groups of recomputed tensors that are named.
_SHOWN = 8
_SECONDS = {
    "predicted step": "step_seconds",
    "computing": "compute_seconds",
    "exposed communication": "exposed_seconds",
    "recomputing": "recomputed_seconds",
}

_N = TypeVar("_N", int, float)
#: A name, its value in each plan, and the change.
_Figure = tuple[str, str, str, str]


def plan_diff(plans: Sequence[Plan], names: Sequence[str]) -> list[RenderableType]:
    """The differences of two plans; empty: they are alike.

    Their predictions and what holds for all parameters; the parameters with other decisions, each
    with the gain that its plan names; orders of collectives; recomputed tensors.

    ``names``: of the plans.
    """
    decisions = _decisions(plans, names)
    figures = _figures(plans)
    lines = [*_orders(plans), *_recomputed(plans, names)]
    if not decisions.row_count and not lines and all(a == b for _, a, b, _ in figures):
        return []
    table = Table(title="step", title_justify="left", header_style="bold")
    for head in ("", *names, "change"):
        table.add_column(head, justify="right" if head else "left")
    for figure in figures:
        table.add_row(*figure)
    return [table, *([decisions] if decisions.row_count else []), *map(Text, lines)]


def _figures(plans: Sequence[Plan]) -> list[_Figure]:
    """What holds for whole plans: settings that differ, and the predictions."""
    settings: dict[str, Callable[[Plan], str]] = {
        "ranks": _ranks,
        "memory limit": lambda plan: _or_none(plan.memory_limit_bytes, format_limit),
        "bucket size": lambda plan: format_bytes(plan.bucket_bytes),
        "in flight": lambda plan: _or_none(plan.in_flight_bytes, format_bytes),
    }
    found = []
    for said, text in settings.items():
        a, b = map(text, plans)
        if a != b:
            found.append((said, a, b, ""))
    predictions = [plan.prediction for plan in plans]
    for said, field in _SECONDS.items():
        values = [getattr(one, field) if one else None for one in predictions]
        found += _compared(said, values, format_seconds)
    found += _compared(
        "predicted peak", [one.peak_bytes if one else None for one in predictions], format_bytes
    )
    for kind in dict.fromkeys(kind for one in predictions if one for kind in one.peak):
        values = [one.peak.get(kind, 0) if one else None for one in predictions]
        if values[0] != values[1]:
            found += _compared(f"  {kind}", values, format_bytes)
    return found


def _compared(said: str, values: Sequence[_N | None], text: Callable[[_N], str]) -> list[_Figure]:
    """A figure of both plans; empty: none has it."""
    if not any(values):
        return []
    before, after = values
    change = f"{after / before - 1:+.1%}" if before and after is not None else ""
    return [(said, _or_none(before, text), _or_none(after, text), change)]


class _Difference(NamedTuple):
    """Alike parameters with the same other decision.

    ``rows``: their rows by plan; None: the plan does not have them. ``said``: the decisions.
    """

    names: list[str]
    rows: list[tuple[ParameterPlan | None, ...]]
    said: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of the parameters."""
        rows = (
            next(row for row in pair if row is not None) for pair in zip(*self.rows, strict=True)
        )
        return sum(math.prod(row.shape) for row in rows)

    def why(self, names: Sequence[str]) -> str:
        """The reason of each plan."""
        lines = []
        for name, rows in zip(names, self.rows, strict=True):
            reason = ranged([row.reason for row in rows if row is not None]) if rows[0] else ""
            lines += [f"{name}: {reason}"] if reason else []
        return "\n".join(lines)


def _differences(plans: Sequence[Plan]) -> list[_Difference]:
    """The differences of the decisions, of most elements first."""
    by_name = [{row.name: row for row in plan.parameters} for plan in plans]
    pairs = {name: tuple(own.get(name) for own in by_name) for name in {**by_name[0], **by_name[1]}}
    said = {name: tuple(map(_said, pair)) for name, pair in pairs.items()}
    differ = [name for name, (a, b) in said.items() if a != b]

    def kind(name: str) -> Hashable:
        return said[name], tuple(kind_of(row.reason) if row else "" for row in pairs[name])

    found = [
        _Difference(names, list(zip(*map(pairs.__getitem__, names), strict=True)), said[names[0]])
        for names in grouped_names(differ, kind)
    ]
    return sorted(found, key=lambda one: -one.numel)


def _decisions(plans: Sequence[Plan], names: Sequence[str]) -> Table:
    """A row for each difference; the small ones, of 1 % of all elements together, share rows."""
    table = Table(title="decisions", title_justify="left", header_style="bold")
    table.add_column("parameter", overflow="fold")
    for name in names:
        table.add_column(name)
    table.add_column("why", overflow="fold")
    found = _differences(plans)
    left = _SMALL * max(sum(math.prod(row.shape) for row in plan.parameters) for plan in plans)
    small: dict[tuple[str, ...], int] = {}
    while found and (left := left - found[-1].numel) >= 0:
        one = found.pop()
        small[one.said] = small.get(one.said, 0) + len(one.names)
    for one in found:
        table.add_row(Text(joined(one.names)), *one.said, Text(one.why(names)))
    for said, count in small.items():
        table.add_row(f"{count} small parameter{'s' * (count > 1)}", *said, "")
    return table


def _orders(plans: Sequence[Plan]) -> list[str]:
    """The graphs whose collectives differ in buckets or order, though both plans have one."""
    one, other = (plan.order for plan in plans)
    found = [phase for phase in one if phase in other and one[phase] != other[phase]]
    return [f"other buckets, or another order of collectives: {', '.join(found)}"] if found else []


def _recomputed(plans: Sequence[Plan], names: Sequence[str]) -> list[str]:
    """The tensors that one plan recomputes and the other does not."""
    found = []
    for name, own, other in zip(names, plans, reversed(plans), strict=True):
        only = [key for key in own.recompute if key not in set(other.recompute)]
        groups = [joined(group) for group in grouped_names(only)]
        if groups:
            said = ", ".join(groups[:_SHOWN]) + (", ..." if len(groups) > _SHOWN else "")
            found.append(f"only {name} recomputes {len(only)} tensors: {said}")
    return found


def _said(row: ParameterPlan | None) -> str:
    """A decision with its slices and their dimension."""
    if row is None:
        return _NONE
    if row.slices == 1:
        return decided(row)
    return decided(row) + (", of its input" if row.along == OF_INPUT else f", along {row.along}")


def _ranks(plan: Plan) -> str:
    hosts = f", {plan.ranks_of_a_host} to a host" if plan.ranks_of_a_host else ""
    return format_ranks(plan.world_size) + hosts


def _or_none(value: _N | None, text: Callable[[_N], str]) -> str:
    return _NONE if value is None else text(value)
