"""Log lines: shown on standard error where logging is not configured."""

from __future__ import annotations

import logging
import sys
from typing import Any


class _OwnHandler(logging.StreamHandler[Any]):
    """Writes to the current ``sys.stderr``, which a progress display replaces while it runs."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignore the value."""


def is_own_handler(log: logging.Logger) -> bool:
    """Whether the logger has the handler of :func:`ensure_visible`: logging is not configured."""
    return any(isinstance(handler, _OwnHandler) for handler in log.handlers)


def ensure_visible(log: logging.Logger) -> None:
    """Show this logger's INFO lines where logging is not configured."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        return
    handler = _OwnHandler()
    handler.setFormatter(logging.Formatter("[osdp] %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
