"""Live Python objects of a class, to find the holders of a parameter."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")


def living(kind: type[_Kind]) -> Iterator[_Kind]:
    """All live objects of a class, from one walk over the garbage collector's objects.

    Uses ``type(x)``: ``x.__class__`` may run the object's own code (proxies, lazy modules).
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kind):
            yield candidate


def closed_over(function: Any) -> dict[str, Any]:
    """A function's closure variables by name, without those not yet assigned."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found
