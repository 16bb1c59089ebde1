"""Figures: matplotlib, where it is installed."""

from __future__ import annotations

from typing import Any


def new_figure(what: str, width: float, height: float) -> Any:
    """An empty figure of so many inches.

    ``what``: asks for it, for people.

    Raises:
        ImportError: without matplotlib, saying how to get it.
    """
    try:
        # The object interface: ``pyplot`` would choose a backend for the whole process.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install 'osdp-compile[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def time_unit_of(step_seconds: float) -> tuple[float, str]:
    """By what seconds are multiplied for an axis up to here, and its unit."""
    if step_seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if step_seconds >= 1e-3 else (1e6, "us")


def byte_unit_of(size_bytes: int) -> tuple[float, str]:
    """By what bytes are multiplied for an axis up to here, and its unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power:
            return 1 / (1 << power), unit
    return 1.0, "B"
