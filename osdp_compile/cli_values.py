"""What the commands' options take: text that becomes bytes, seconds, numbers of ranks."""

from __future__ import annotations

import argparse

from passes.units import parse_bytes


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
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
