"""Figures: an optional matplotlib, and units for axes."""

from __future__ import annotations

from typing import Any


def new_figure(what: str, width: float, height: float) -> Any:
    """An empty figure; ``width`` and ``height`` in inches.

    ``what``: the option or function that needs the figure, for the error message.

    Raises:
        ImportError: matplotlib is missing; the message says how to install it.
    """
    try:
        # The object interface: ``pyplot`` would choose a backend for the whole process.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install 'osdp-compile[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def time_unit_of(step_seconds: float) -> tuple[float, str]:
    """Factor from seconds to an axis unit, and the unit, for values up to ``step_seconds``."""
    if step_seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if step_seconds >= 1e-3 else (1e6, "us")


def byte_unit_of(size_bytes: int) -> tuple[float, str]:
    """Factor from bytes to an axis unit, and the unit, for values up to ``size_bytes``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power:
            return 1 / (1 << power), unit
    return 1.0, "B"
