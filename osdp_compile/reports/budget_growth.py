"""Budget growth: the growth of a planned step against stored figures, in lines for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from osdp_compile.reports.alike_layers import grouped_names, joined
from osdp_compile.reports.budget_figures import BudgetFigures, ParameterFigures
from passes.types.units import format_bytes, format_seconds

#: Lines of a section. One more line has the sum of the others.
_SHOWN = 8

_V = TypeVar("_V", int, ParameterFigures)


class _Line(NamedTuple):
    """A line of a section. ``size_bytes``: now. ``change_bytes``: since the stored figures."""

    text: str
    size_bytes: int
    change_bytes: int = 0


def growth_of_peak(now: BudgetFigures, before: BudgetFigures | None) -> list[str]:
    """The parts of the peak, and the buffers in it, the most grown first.

    ``before``: the stored figures; None: there are none. Without a change, the largest buffers.
    """
    stored = "" if before is None else f", stored {format_bytes(before.peak_bytes)}"
    if before is not None and before.peak_phase != now.peak_phase:
        stored += f" in the {before.peak_phase}"
    head = f"peak, in the {now.peak_phase}: {format_bytes(now.peak_bytes)}{stored}"
    old = {} if before is None else before.peak
    parts = [
        _Line(
            f"{kind}: {format_bytes(now.peak.get(kind, 0))}",
            now.peak.get(kind, 0),
            0 if before is None else now.peak.get(kind, 0) - old.get(kind, 0),
        )
        for kind in {**now.peak, **old}
    ]
    lines = [head, *_listed(parts, len(parts))]
    changes = [] if before is None else _changes(now.buffers, before.buffers, int, _resized)
    if changes:
        return [*lines, "tensors at the peak that changed:", *_listed(changes)]
    largest = _sizes(now.buffers)
    return [*lines, "largest tensors at the peak:", *_listed(largest)] if largest else lines


def growth_of_parameters(
    now: Mapping[str, ParameterFigures], before: Mapping[str, ParameterFigures]
) -> list[str]:
    """New, gone and resized parameters, the most grown first; empty: there are none."""
    pairs = [{name: _undecided(one) for name, one in own.items()} for own in (now, before)]
    changes = _changes(pairs[0], pairs[1], lambda one: one.size_bytes, _reformed)
    if not changes:
        return []
    change_bytes = sum(line.change_bytes for line in changes)
    return [f"parameters, whole: {_signed(change_bytes)}", *_listed(changes)]


def changed_decisions(now: BudgetFigures, before: BudgetFigures) -> list[str]:
    """Parameters with another decision than before, the largest first; empty: there are none."""
    both = [name for name in now.parameters if name in before.parameters]
    pairs = {
        name: (before.parameters[name].decision, now.parameters[name].decision) for name in both
    }
    lines = [
        _Line(
            f"{joined(names)}: {' -> '.join(pairs[names[0]])}",
            sum(now.parameters[name].size_bytes for name in names),
        )
        for names in grouped_names([n for n in both if len(set(pairs[n])) > 1], pairs.__getitem__)
    ]
    return ["parameters with another decision:", *_listed(lines)] if lines else []


def growth_of_step(now: BudgetFigures, before: BudgetFigures | None) -> list[str]:
    """Compute and exposed communication of every phase.

    ``before``: the stored figures; None: there are none.
    """
    stored = "" if before is None else f", stored {format_seconds(before.step_seconds)}"
    lines = [f"step: {format_seconds(now.step_seconds)}{stored}"]
    old = now if before is None else before  # no change is shown
    for name, phase in now.phases.items():
        one = old.phases.get(name, phase)
        compute = _seconds(phase.compute_seconds, one.compute_seconds)
        exposed = _seconds(phase.exposed_seconds, one.exposed_seconds)
        lines.append(f"  {name}: compute {compute}, exposed communication {exposed}")
    if now.recomputed_seconds or old.recomputed_seconds:
        recomputed = _seconds(now.recomputed_seconds, old.recomputed_seconds)
        lines.append(f"  recomputing, within the backward: {recomputed}")
    return lines


def changed_settings(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """The settings that differ from the stored ones; empty: none."""
    pairs = {name: (before.get(name, ""), now.get(name, "")) for name in {**before, **now}}
    lines = [f"  {name}: {a} -> {b}" for name, (a, b) in pairs.items() if a != b]
    return ["the stored figures are of other settings:", *lines] if lines else []


def _changes(
    now: Mapping[str, _V],
    before: Mapping[str, _V],
    size: Callable[[_V], int],
    said: Callable[[_V | None, _V | None], str],
) -> list[_Line]:
    """A line for alike names with the same change. ``said``: the values, before and now."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    lines = []
    for group in grouped_names(names, kind=lambda name: (before.get(name), now.get(name))):
        old, new = before.get(group[0]), now.get(group[0])
        sizes = [len(group) * (0 if one is None else size(one)) for one in (old, new)]
        each = _each(group) if old is not None and new is not None else ""
        text = f"{joined(group)}: {said(old, new)}{each}"
        lines.append(_Line(text, sizes[1], sizes[1] - sizes[0]))
    return lines


def _resized(before: int | None, now: int | None) -> str:
    if before is None:
        return "new"
    return "gone" if now is None else f"{format_bytes(before)} -> {format_bytes(now)}"


def _reformed(before: ParameterFigures | None, now: ParameterFigures | None) -> str:
    if now is None:
        return "gone"
    return f"new, {now.form}" if before is None else f"{before.form} -> {now.form}"


def _sizes(values: Mapping[str, int]) -> list[_Line]:
    """A line for alike names of the same size."""
    return [
        _Line(
            f"{joined(group)}: {format_bytes(values[group[0]])}{_each(group)}",
            len(group) * values[group[0]],
        )
        for group in grouped_names(values, kind=values.__getitem__)
    ]


def _each(group: Sequence[str]) -> str:
    return " each" if len(group) > 1 else ""


def _listed(lines: Sequence[_Line], shown: int = _SHOWN) -> list[str]:
    """The lines, the most grown first, then the largest; the rest as one."""
    ordered = sorted(lines, key=lambda line: (-line.change_bytes, -line.size_bytes, line.text))
    rest = ordered[shown:]
    found = [
        f"  {line.text}" + (f", {_signed(line.change_bytes)}" if line.change_bytes else "")
        for line in ordered[:shown]
    ]
    if rest:
        change_bytes = sum(line.change_bytes for line in rest)
        found.append(f"  {len(rest)} more" + (f", {_signed(change_bytes)}" if change_bytes else ""))
    return found


def _undecided(one: ParameterFigures) -> ParameterFigures:
    return dataclasses.replace(one, decision="")


def _signed(size_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else ''}{format_bytes(size_bytes)}"


def _seconds(now: float, before: float) -> str:
    if format_seconds(abs(now - before)) == format_seconds(0.0):
        return format_seconds(now)
    sign = "+" if now > before else ""
    return f"{format_seconds(now)} ({sign}{format_seconds(now - before)})"
