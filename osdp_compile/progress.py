"""Progress of long work: one live line on a terminal, one log line per stage elsewhere.

    with stages("first call", log.info):
        stage("planning")
        detail("plan 12 of up to 120")

Callees need no handle: :func:`stage` and :func:`detail` apply to the innermost running work of this
process, and do nothing without one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from osdp_compile.log_lines import ensure_visible, is_own_handler, is_rank_zero
from passes.types.units import format_seconds

log = logging.getLogger("osdp_compile")
#: Log lines omit shorter times.
_LEAST_SHOWN_SECONDS = 0.05
F = TypeVar("F", bound=Callable[..., Any])

_under_way: list[_Work] = []


class _Work:
    """Running work: seconds per stage, and the live line if there is a terminal."""

    def __init__(self, name: str, say: Callable[[str], None], terminal: bool) -> None:
        self.name, self._say, self._started = name, say, time.perf_counter()
        self.seconds: dict[str, float] = {}
        self._stage = ""
        self._stage_started = self._started
        self._line: Progress | None = None
        if terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            console = Console(stderr=True)
            self._line = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._task = self._line.add_task(name)
            self._line.start()

    @property
    def total_seconds(self) -> float:
        return time.perf_counter() - self._started

    def stage(self, name: str) -> None:
        self._end_stage()
        self._stage = name
        self.detail("")
        if self._line is None:
            total = self.total_seconds
            after = f" (after {format_seconds(total)})" if total >= _LEAST_SHOWN_SECONDS else ""
            self._say(f"{self.name}: {name}{after}")

    def detail(self, text: str) -> None:
        if self._line is not None:
            shown = ", ".join(part for part in (self._stage, text) if part)
            self._line.update(self._task, description=f"{self.name}: {shown}")

    def end(self) -> None:
        self._end_stage()
        if self._line is not None:
            self._line.stop()

    def _end_stage(self) -> None:
        now = time.perf_counter()
        if self._stage:
            before = self.seconds.get(self._stage, 0.0)
            self.seconds[self._stage] = before + now - self._stage_started
        self._stage, self._stage_started = "", now


@contextlib.contextmanager
def stages(
    name: str, say: Callable[[str], None], *, lines_too: bool = False
) -> Iterator[dict[str, float]]:
    """Work with stages; yields the seconds that each stage took so far.

    Args:
        name: of the work; each line starts with it.
        say: writes one line at the start of each stage, where standard error is no terminal.
        lines_too: write these lines on a terminal too, instead of the live line.
    """
    work = _Work(name, say, terminal=sys.stderr.isatty() and not lines_too)
    _under_way.append(work)
    try:
        yield work.seconds
    finally:
        _under_way.remove(work)
        work.end()


def stage(name: str) -> None:
    """Begin the next stage of the running work."""
    if _under_way:
        _under_way[-1].stage(name)


def detail(text: str) -> None:
    """Show how far the current stage is; on a terminal only."""
    if _under_way:
        _under_way[-1].detail(text)


def of_first_call(function: F) -> F:
    """Decorate a first call: rank 0 shows its stages, and logs the seconds of each."""

    @functools.wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if not _is_shown():
            return function(*args, **kwargs)
        started = time.perf_counter()
        with stages("first call", log.info, lines_too=not is_own_handler(log)) as seconds:
            made = function(*args, **kwargs)
        total = format_seconds(time.perf_counter() - started)
        parts = ", ".join(f"{name} {format_seconds(taken)}" for name, taken in seconds.items())
        log.info("first call took %s before compiling: %s", total, parts)
        return made

    return shown  # type: ignore[return-value]


@contextlib.contextmanager
def compiling(cause: str | None, first: bool) -> Iterator[None]:
    """The compilation of one graph of a sharded model. Rank 0 logs its cause and its seconds.

    Args:
        cause: Dynamo's reason for a recompilation; None: the frame's first compilation.
        first: the model's first compilation; a log line announces it.
    """
    if not _is_shown():
        yield
        return
    started = time.perf_counter()
    say: Callable[[str], None] = log.info if first else (lambda text: None)
    with stages("first call" if first else "osdp", say, lines_too=not is_own_handler(log)):
        stage("compiling" if cause is None else "compiling again")
        yield
    seconds = format_seconds(time.perf_counter() - started)
    if cause is None:
        log.info("compiled in %s", seconds)
    else:
        log.info("compiled again in %s: %s", seconds, shortened(cause))


def shortened(cause: str) -> str:
    """The cause of a recompilation in one line, without Dynamo's frame number.

    >>> shortened("0/0: tensor 'x' size mismatch at index 0. expected 8, actual 12\\n(more)")
    "tensor 'x' size mismatch at index 0. expected 8, actual 12"
    """
    line = cause.strip().splitlines()[0]
    number, colon, rest = line.partition(": ")
    return rest if colon and number.replace("/", "").isdigit() else line


def _is_shown() -> bool:
    """Whether this process shows progress: rank 0, if INFO is enabled."""
    ensure_visible(log)
    return is_rank_zero() and log.isEnabledFor(logging.INFO)
