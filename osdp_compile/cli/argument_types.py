"""Argument types: parse command-line text (bytes, seconds, counts, meshes, slices); check files."""

from __future__ import annotations

import argparse
from pathlib import Path

from passes.types.units import parse_limit


def mesh_of(text: str) -> dict[str, int]:
    """Ranks by dimension, from ``host=2,gpu=8``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not (name.isidentifier() and equals and size.isdigit() and int(size)) or name in sizes:
            raise argparse.ArgumentTypeError(f"{text!r} is not like host=2,gpu=8")
        sizes[name] = int(size)
    return sizes


def seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return seconds


def bytes_of(text: str) -> int:
    """A memory size; an implausibly small number without a unit is an error."""
    try:
        return parse_limit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_of(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def counts_of(text: str) -> tuple[int, ...]:
    """Whole numbers, from ``1,2,4``."""
    return tuple(count_of(part) for part in text.split(","))


def limits_of(text: str) -> tuple[int, ...]:
    """Sizes in bytes, from ``40GB,80GB``."""
    return tuple(bytes_of(part) for part in text.split(","))


def factors_of(text: str) -> tuple[float, ...]:
    """Multiples, from ``0.5x,1x,2x``."""
    found = []
    for part in text.split(","):
        try:
            factor = float(part.removesuffix("x")) if part.endswith("x") else 0.0
        except ValueError:
            factor = 0.0
        if not 0 < factor < float("inf"):
            raise argparse.ArgumentTypeError(f"{part!r} is not a multiple above zero, like 0.5x")
        found.append(factor)
    return tuple(found)


def slices_of(text: str) -> int | dict[str, int | tuple[int, int]]:
    """The option ``slices``, from ``1`` or ``up.weight=4,head.weight=8:2`` (2 of 8 slices kept)."""
    if text == "1":
        return 1
    found: dict[str, int | tuple[int, int]] = {}
    for part in text.split(","):
        name, equals, numbers = part.partition("=")
        slices, colon, kept = numbers.partition(":")
        if not (name and equals and slices.isdigit() and (kept.isdigit() or not colon)):
            raise argparse.ArgumentTypeError(f"{part!r} is not like up.weight=4 or up.weight=4:1")
        found[name] = (int(slices), int(kept)) if colon else int(slices)
    return found


def prepare_file(out: Path) -> str:
    """Create the folder of a file and check that the file is writable; the problem, or ""."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        was_there = out.exists()
        out.open("a").close()
        if not was_there:
            out.unlink()
    except OSError as error:
        return f"cannot write {out}: {error.strerror}"
    return ""
