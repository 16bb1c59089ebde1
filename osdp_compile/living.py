"""Living objects of a class: who holds a parameter, which itself does not say."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TypeVar

_Kind = TypeVar("_Kind")


def living(kind: type[_Kind]) -> Iterator[_Kind]:
    """All objects of a class that there are, by one walk over everything that is collected.

    By their type: asking an object for its class may run code of its own (proxies, lazy modules).
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kind):
            yield candidate
