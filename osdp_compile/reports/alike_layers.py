"""Alike layers: one row, one name and one text for rows that differ only in a layer's number."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence

from passes.types.plan import ParameterPlan

_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:])")


def grouped(rows: Sequence[ParameterPlan]) -> Iterable[list[ParameterPlan]]:
    """Groups of rows with one decision that differ only in a layer's number."""
    by_name = {row.name: row for row in rows}

    def kind(name: str) -> Hashable:
        row = by_name[name]
        decision = row.decision, row.slices, row.kept_slices
        moves = row.moves, row.dim, row.alone, row.chunks
        return row.shape, decision, moves, kind_of(row.reason)

    for names in grouped_names(by_name, kind):
        yield [by_name[name] for name in names]


def grouped_names(
    names: Iterable[str], kind: Callable[[str], Hashable] = lambda _: None
) -> Iterable[list[str]]:
    """Groups of names that differ only in a layer's number, in the order of their first names.

    ``kind``: names of several kinds are not in one group.
    """
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        groups.setdefault((_NUMBER.sub("*", name), kind(name)), []).append(name)
    for group in groups.values():
        yield from _grids(group)


def _grids(names: list[str]) -> Iterable[list[str]]:
    """Split names into groups that have every combination of their numbers.

    Only then a name with ranges covers exactly these.
    """
    numbers = [_NUMBER.findall(name) for name in names]
    spans = [len(set(column)) for column in zip(*numbers, strict=True)]
    if math.prod(spans) == len(names):
        yield names
        return
    varies = next(index for index, span in enumerate(spans) if span > 1)
    parts: dict[str, list[str]] = {}
    for name, own in zip(names, numbers, strict=True):
        parts.setdefault(own[varies], []).append(name)
    for part in parts.values():
        yield from _grids(part)


_SECONDS = re.compile(r"[\d.]+ (?:s|ms|us)\b")
_IN_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def kind_of(reason: str) -> str:
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
    """One name with ranges for a group of names: ``blocks.{0..11}.up.weight``."""
    if len(names) == 1:
        return names[0]
    numbers = [_NUMBER.findall(name) for name in names]
    columns = list(zip(*numbers, strict=True))
    parts = iter(_span(sorted(set(map(int, column)))) for column in columns)
    return _NUMBER.sub(lambda _: next(parts), names[0])


_RANGES = re.compile(r"(?<=\.)\{([\d.,]+)\}(?=[.:])")


def expanded(name: str) -> list[str]:
    """The names of a name with ranges, which :func:`joined` made.

    >>> expanded("blocks.{0,2..3}.up.weight")
    ['blocks.0.up.weight', 'blocks.2.up.weight', 'blocks.3.up.weight']
    """
    texts = _RANGES.split(name)  # text, ranges, text, ranges, ..., text
    choices = [_numbers(text) if index % 2 else [text] for index, text in enumerate(texts)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    """The numbers of ``0,2..3``."""
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("..")
        found += map(str, range(int(first), int(last or first) + 1))
    return found


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
