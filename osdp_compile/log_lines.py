"""The package's log: its loggers, the ranks that show lines, and a handler if there is none.

Lines go to the logger ``osdp_compile``, and lines of ``passes/`` to ``passes``. Both propagate to
the logger ``osdp``. ``TORCH_LOGS="+osdp"`` gives that one its level and its handler
(``log_name/osdp``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

#: The logger above all others of the package, and the package's own.
NAMES = ("osdp", "osdp_compile")
#: The argument ``extra`` of a warning that every rank logs in the same words: rank 0 shows it.
OF_ALL_RANKS = {"is_of_all_ranks": True}


class _OwnHandler(logging.StreamHandler[Any]):
    """Writes to the current ``sys.stderr``, which a progress display replaces while it runs."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignore the value."""


def is_rank_zero() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def is_shown(record: logging.LogRecord) -> bool:
    """Whether this rank shows a line: rank 0 shows all, other ranks show their own warnings."""
    of_this_rank = record.levelno >= logging.WARNING and not hasattr(record, "is_of_all_ranks")
    return of_this_rank or is_rank_zero()


def _attach() -> None:
    """Attach the package's loggers to the logger ``osdp``, and filter lines by rank.

    A logger of that name alone would do too. But programs configure the logger of the package's
    name, and ``TORCH_LOGS`` takes that name as well.
    """
    top, own, of_passes = (logging.getLogger(name) for name in (*NAMES, "passes"))
    own.parent, of_passes.parent = top, own
    for log in (own, of_passes):
        log.addFilter(is_shown)


_attach()


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


def leave_to_torch(names: Sequence[str]) -> None:
    """Show each line once: by torch's handler, and not by one of ours or of the program.

    Args:
        names: those of :data:`NAMES` to which ``TORCH_LOGS`` or ``torch._logging.set_logs`` gave a
            level. None: nothing changes.
    """
    log = logging.getLogger(NAMES[1])
    if names and is_own_handler(log):  # torch was told after the first line
        for handler in log.handlers[:]:
            if isinstance(handler, _OwnHandler):
                log.removeHandler(handler)
        if log.name not in names:
            log.setLevel(logging.NOTSET)
            log.propagate = True
    for name in names:
        if logging.getLogger(name).handlers:  # as of torch's own components
            logging.getLogger(name).propagate = False
