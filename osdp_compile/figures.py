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
