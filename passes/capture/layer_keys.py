"""Layer keys: the operator keys of all layers, from a trace of the first and the last ones.

An operator's key is its module, its name and a count
(:func:`passes.recompute.recompute_activations.keys_of`). Most operators of a layer belong to a
module inside it, or to one at the beginning of the next layer. Their keys differ from layer to
layer in one number. Operators without a module, as those of a derivative, are counted through all
layers, forwards or backwards. The layers left out increase the counts of all that follow them.
"""

from __future__ import annotations

import dataclasses
import itertools
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
        place, count = _place_and_count(key)
        first, more = self.inserted.get(place, (0, 0))
        return f"{place}:{count + more}" if count >= first else key


def layer_keys(traced: Sequence[Sequence[str]], prefix: str, layers: int) -> LayerKeys | None:
    """The keys of all layers; None: they do not follow from those of the trace.

    ``traced``: the keys of the trace's layers except the first and the last one; corresponding keys
    are at the same place. The first half are the first layers of the step, the others the last.
    ``prefix``: the name of the list of layers, with its dot. ``layers``: their number.
    """
    half = len(traced) // 2
    missing = layers - 2 - len(traced)
    numbers = [n + 1 + (missing if n >= half else 0) for n in range(len(traced))]
    columns = list(zip(*traced, strict=True))
    named = [_named(column, prefix, numbers) for column in columns]
    counted: dict[str, list[list[int]]] = {}
    for column, known in zip(columns, named, strict=True):
        if known is None:
            places, counts = zip(*map(_place_and_count, column), strict=True)
            if len({*places}) > 1:
                return None
            counted.setdefault(places[0], []).append([*counts])
    inserted = {}
    for place, every in counted.items():
        first = _first_after(every, half)
        if first is None:
            return None
        inserted[place] = first, missing * len(every)
    keys = LayerKeys((), inserted)

    def key_of(place: int, layer: int) -> str:
        known = named[place]
        if known is not None:
            return f"{known[0]}{layer + known[1]}{known[2]}"
        (_, one), (_, next_one) = map(_place_and_count, columns[place][:2])
        name, start = _place_and_count(keys.renamed(columns[place][0]))
        return f"{name}:{start + (next_one - one) * (layer - 1)}"

    rows = [tuple(key_of(p, n) for p in range(len(columns))) for n in range(1, layers - 1)]
    return dataclasses.replace(keys, operators=tuple(rows))


def _place_and_count(key: str) -> tuple[str, int]:
    place, _, count = key.rpartition(":")
    return place, int(count)


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
    steps = {after - before for own in counts for before, after in itertools.pairwise(own)}
    if len(steps) != 1 or abs(*steps) != len(counts):
        return None
    before, behind = ([own[place] for own in counts] for place in (half - 1, half))
    earlier, later = (before, behind) if max(before) < min(behind) else (behind, before)
    return min(later) if max(earlier) < min(later) else None
