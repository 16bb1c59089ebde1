"""Decode: dataclasses from the builtin values that JSON has, with errors that name the field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


def decoded(cls: type[_T], data: Any) -> _T:
    """An instance of a dataclass from its fields.

    Raises:
        ValueError: for a field that is missing, unknown, or of another type. The message has its
            path, as ``$.prediction.peak``.
    """
    try:
        made = msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    unknown = _unknown(data, msgspec.to_builtins(made), "$")
    if unknown is not None:
        raise ValueError(f"unknown field {unknown}")
    return made


def _unknown(data: Any, known: Any, path: str) -> str | None:
    """The path of the first field that the decoded value lacks; None: it has all."""
    if isinstance(data, dict) and isinstance(known, dict):
        for name, value in data.items():
            own = f"{path}.{name}"
            found = _unknown(value, known[name], own) if name in known else own
            if found is not None:
                return found
    elif isinstance(data, list | tuple) and isinstance(known, list | tuple):
        for index, (value, other) in enumerate(zip(data, known, strict=True)):
            found = _unknown(value, other, f"{path}[{index}]")
            if found is not None:
                return found
    return None
