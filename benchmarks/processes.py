"""Processes of this machine as the ranks of a process group.

    with Processes(2) as ranks:
        ranks.run([sys.executable, "train.py"])

:class:`benchmarks.hosts.Hosts` puts them on hosts of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_PREFIX = "osdp-ranks"


class RanksError(RuntimeError):
    """A rank failed, or could not be started."""


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Processes:
    """``ranks`` processes that reach each other over loopback.

    ``backend``: of their process group, such as ``cpu:gloo,cuda:nccl``.
    """

    def __init__(self, ranks: int, backend: str = "gloo") -> None:
        self.ranks, self.backend = ranks, backend
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks. May be called twice."""
        self._end_ranks()

    def _end_ranks(self) -> None:
        for rank in self._running:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        self._running.clear()

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 900.0,
    ) -> None:
        """Run a command as every rank, with torch.distributed's variables set.

        Raises:
            RanksError: a rank fails, or the time is over. The message has the end of its output.
        """
        port = self.port()
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
            logs = [Path(folder) / f"rank{rank}" for rank in range(self.ranks)]
            try:
                for rank, log in enumerate(logs):
                    variables = {**(environment or {}), **self.variables(rank, port)}
                    own = [*self.command_prefix(rank), *command]
                    self._running.append(_started(own, variables, log))
                self._wait(logs, timeout_seconds)
            finally:
                self._end_ranks()

    def port(self) -> int:
        """A free port for the next run."""
        return free_port()

    def command_prefix(self, rank: int) -> Sequence[str]:
        """The command that runs a rank's command."""
        return ()

    def variables(self, rank: int, port: int) -> dict[str, str]:
        """The environment variables by which a rank finds the others."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _wait(self, logs: Sequence[Path], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            codes = [rank.poll() for rank in self._running]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                time.sleep(2)  # the others' last words
                raise RanksError("\n".join(_last_words(rank, logs[rank]) for rank in failed))
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                late = [rank for rank, code in enumerate(codes) if code is None]
                words = "\n".join(_last_words(rank, logs[rank]) for rank in late)
                raise RanksError(f"not done after {timeout_seconds:.0f} s\n{words}")
            time.sleep(0.1)


def _started(
    command: Sequence[str], variables: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a rank's own children end with it
        )


def _last_words(rank: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"--- rank {rank} failed:", *lines[-30:]])
