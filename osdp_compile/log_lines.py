"""Log lines: seen on standard error where nobody has configured logging."""

from __future__ import annotations

import logging
import sys
from typing import Any


class _OwnHandler(logging.StreamHandler[Any]):
    """To standard error, whatever it is by then: what moves on a terminal stands in for it."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Nothing is kept."""


def is_own_handler(log: logging.Logger) -> bool:
    """Whether the logger has the handler of :func:`ensure_visible`: nobody configured logging."""
    return any(isinstance(handler, _OwnHandler) for handler in log.handlers)


def ensure_visible(log: logging.Logger) -> None:
    """Make INFO of this logger visible where nobody has configured logging."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        return
    handler = _OwnHandler()
    handler.setFormatter(logging.Formatter("[osdp] %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
