"""Dynamic program: the cheapest decisions within a memory budget, at given prices.

An *item* j is a group of parameters that are alike. Its options o give the first k parameters one
decision and the others another one. An option has a value c(j, o) in seconds and a weight w(j, o)
in bytes. With memory in units of 1/1024 of the budget::

    f[j][v] = min over o of f[j-1][v - w(j, o)] + c(j, o)

Recurrence: the 0/1 knapsack of OSDP (arXiv 2209.13258, section 3.3) and Galvatron.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Number of units of the budget.
UNITS = 1024


def best_options(
    values: Sequence[np.ndarray], weights: Sequence[np.ndarray], budget_bytes: int | None
) -> list[int] | None:
    """The option of every item with the least sum of values within the budget.

    ``values``: seconds by option, for each item. ``weights``: bytes by option. ``budget_bytes``:
    None: no budget.

    Returns None if no options fit.
    """
    if budget_bytes is None:
        return [int(np.argmin(own)) for own in values]
    least = [float(own.min()) for own in weights]
    left_bytes = budget_bytes - sum(least)
    if left_bytes < 0:
        return None
    most_bytes = sum(float(own.max()) for own in weights) - sum(least)
    whole = min(left_bytes, most_bytes)
    unit_bytes = max(1.0, whole / UNITS)
    units = int(whole / unit_bytes)
    while True:
        picks = _picks(values, weights, least, unit_bytes, units)
        taken = sum(float(own[pick]) for own, pick in zip(weights, picks, strict=True))
        if taken <= budget_bytes:  # sizes are rounded to the nearest unit
            return picks
        units -= max(1, int((taken - budget_bytes) / unit_bytes))
        if units < 0:
            return [int(np.lexsort((c, w))[0]) for c, w in zip(values, weights, strict=True)]


def _picks(
    values: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    least: Sequence[float],
    unit_bytes: float,
    units: int,
) -> list[int]:
    best = np.zeros(units + 1)
    chosen: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    for value, weight, floor in zip(values, weights, least, strict=True):
        size = np.rint((weight - floor) / unit_bytes).astype(np.int64)
        order = np.lexsort((value, size))  # drop options with more bytes and no fewer seconds
        found = np.full(units + 1, np.inf)
        pick = np.zeros(units + 1, dtype=np.int32)
        cheapest = np.inf
        for option in order:
            if value[option] >= cheapest or size[option] > units:
                continue
            cheapest = value[option]
            start = size[option]
            tried = best[: units + 1 - start] + value[option]
            better = tried < found[start:]
            found[start:][better] = tried[better]
            pick[start:][better] = option
        best = found
        chosen.append(pick)
        sizes.append(size)
    left = units
    picks: list[int] = []
    for pick, size in zip(reversed(chosen), reversed(sizes), strict=True):
        picks.append(int(pick[left]))
        left -= int(size[picks[-1]])
    return picks[::-1]
