"""Layer keys: the operator keys of all layers, from a trace of the first and the last ones.

An operator's key is its module and a count (:func:`passes.recompute.recompute_activations.keys_of`).
Most operators of a layer belong to a module inside it, or to one at the beginning of the next layer:
their keys differ from layer to layer in one number. Operators without a module, as those of a
derivative, are counted through all layers, forwards or backwards. The layers that the trace leaves
out move the counts of all that come after them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LayerKeys:
    """Keys of a step of many layers.

    ``operators``: of every layer except the first and the last one.
    ``inserted``: by module and operator that are counted through all layers, the first count of the
    trace that comes after the layers left out, and the number of their operators.
    """

    operators: tuple[tuple[str, ...], ...]
    inserted: dict[str, tuple[int, int]]

    def renamed(self, key: str) -> str:
        """The key in the whole step of an operator of the trace."""
        place, _, number = key.rpartition(":")
        first, more = self.inserted.get(place, (0, 0))
        return f"{place}:{int(number) + more}" if int(number) >= first else key


def layer_keys(traced: Sequence[Sequence[str]], prefix: str, layers: int) -> LayerKeys | None:
    """The keys of all layers; None: they do not follow from those of the trace.

    ``traced``: the keys of the trace's layers except the first and the last one. The first half are
    the first layers of the step, the others the last ones; corresponding keys are at the same place.
    ``prefix``: the name of the list of layers, with its dot. ``layers``: their number.
    """
    half = len(traced) // 2
    missing = layers - 2 - len(traced)
    numbers = [n + 1 + (missing if n >= half else 0) for n in range(len(traced))]
    named: list[tuple[str, int, str] | None] = []
    counted: dict[str, list[list[int]]] = {}
    columns = list(zip(*traced, strict=True))
    for column in columns:
        one = _named(column, prefix, numbers)
        named.append(one)
        if one is None:
            place = column[0].rpartition(":")[0]
            if any(key.rpartition(":")[0] != place for key in column):
                return None
            counted.setdefault(place, []).append([int(key.rpartition(":")[2]) for key in column])
    inserted = {}
    for place, counts in counted.items():
        first = _first_after(counts, half)
        if first is None:
            return None
        inserted[place] = first, missing * len(counts)
    keys = LayerKeys((), inserted)
    rows = []
    for number in range(1, layers - 1):
        row = []
        for column, one in zip(columns, named, strict=True):
            if one is not None:
                row.append(f"{one[0]}{number + one[1]}{one[2]}")
                continue
            place, _, start = keys.renamed(column[0]).rpartition(":")
            step = int(column[1].rpartition(":")[2]) - int(column[0].rpartition(":")[2])
            row.append(f"{place}:{int(start) + step * (number - 1)}")
        rows.append(tuple(row))
    return dataclasses.replace(keys, operators=tuple(rows))


def _named(
    column: Sequence[str], prefix: str, numbers: Sequence[int]
) -> tuple[str, int, str] | None:
    """Corresponding keys without the number of their layer; None: they name no layer.

    The part before the number of a layer in the key, that number less the own one, and the rest.
    """
    found = []
    for key, number in zip(column, numbers, strict=True):
        match = re.fullmatch(rf"((?:.*\.)?{re.escape(prefix)})(\d+)([.:].*)", key)
        if match is None:
            return None
        found.append((match[1], int(match[2]) - number, match[3]))
    del found[len(found) // 2 - 1]  # the next layer of the trace is not the next one of the step
    return found[0] if len({*found}) == 1 else None


def _first_after(counts: Sequence[Sequence[int]], half: int) -> int | None:
    """The first count after the layers left out; None: the layers are not counted evenly.

    ``counts``: by operator of one kind, its counts in the layers of the trace.
    """
    steps = {after - before for own in counts for before, after in zip(own, own[1:], strict=False)}
    if len(steps) != 1 or abs(*steps) != len(counts):
        return None
    before, behind = ([own[place] for own in counts] for place in (half - 1, half))
    earlier, later = (before, behind) if max(before) < min(behind) else (behind, before)
    return min(later) if max(earlier) < min(later) else None
