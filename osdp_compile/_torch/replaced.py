"""Replacement of a name of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Context: a name of a module is what a function makes of it."""
    plain = getattr(owner, name)
    try:
        setattr(owner, name, make(plain))
        yield
    finally:
        setattr(owner, name, plain)
