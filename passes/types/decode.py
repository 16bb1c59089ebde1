"""Decode: dataclasses from the builtin values that JSON has, with errors that name the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


def decoded(cls: type[_T], data: Any, needed: Collection[str] = ()) -> _T:
    """An instance of a dataclass from its fields.

    ``needed``: names of fields, at any depth, that have a default and must be there all the same.

    Raises:
        ValueError: for a field that is missing, unknown, or of another type. The message has its
            path, as ``$.prediction.peak``.
    """
    try:
        made = msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    _check_names(data, encoded(made), needed, "$")
    return made


def encoded(value: Any) -> dict[str, Any]:
    """A dataclass as builtin values, with all of its fields.

    ``msgspec.to_builtins`` alone leaves out fields that :func:`decoded` did not set.
    """
    found: dict[str, Any] = msgspec.to_builtins(dataclasses.asdict(value))
    return found


def _check_names(data: Any, made: Any, needed: Collection[str], path: str) -> None:
    """Refuse names that only one of the two has. ``made``: the decoded value, encoded again."""
    if isinstance(data, dict) and isinstance(made, dict):
        for name in data:
            if name not in made:
                raise ValueError(f"unknown field {path}.{name}")
        for name in needed:
            if name in made and name not in data:
                raise ValueError(f"missing field {path}.{name}")
        for name, value in data.items():
            _check_names(value, made[name], needed, f"{path}.{name}")
    elif isinstance(data, list | tuple) and isinstance(made, list | tuple):
        for index, (value, other) in enumerate(zip(data, made, strict=True)):
            _check_names(value, other, needed, f"{path}[{index}]")
