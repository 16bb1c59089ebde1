"""The time at which the kit ends, and commands that end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from benchmarks.launch import ROOT

#: What an interrupted command has to end its ranks in.
_GRACE_SECONDS = 5.0


class TimeUpError(RuntimeError):
    """A command had not ended when the kit's time was up."""


class Deadline:
    """The end of all commands, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._until_seconds = time.monotonic() + seconds
        self._running: set[subprocess.Popen[str]] = set()

    def left_seconds(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._until_seconds - time.monotonic())

    def run(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the repository; interrupt it and its children when the time is up.

        ``variables``: of the environment, beside this process's own.

        Raises:
            TimeUpError: if the time was up first.
        """
        if not self.left_seconds():
            raise TimeUpError("not started: the time was up (--minutes)")
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that its children can be interrupted, too
        ) as process:
            self._running.add(process)
            try:
                output, errors = process.communicate(timeout=self.left_seconds())
            except subprocess.TimeoutExpired:
                _end(process)
                raise TimeUpError("not done when the time was up (--minutes)") from None
            except BaseException:
                _end(process)
                raise
            finally:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def interrupt(self) -> None:
        """Interrupt the commands that other threads run."""
        for process in list(self._running):
            _signal(process, signal.SIGINT)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt the processes of a session, which end the ranks that they started; then kill."""
    for sent in (signal.SIGINT, signal.SIGKILL):
        _signal(process, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_SECONDS)


def _signal(process: subprocess.Popen[str], sent: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, sent)
