"""Living objects of a class: who holds a parameter, which itself does not say."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")


def living(kind: type[_Kind]) -> Iterator[_Kind]:
    """All objects of a class that there are, by one walk over everything that is collected.

    By their type: asking an object for its class may run code of its own (proxies, lazy modules).
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kind):
            yield candidate


def closed_over(function: Any) -> dict[str, Any]:
    """What a function closes over, by name, without what is not there yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found
