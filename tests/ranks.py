"""Ranks for tests: processes on this machine (gloo over loopback) that run functions.

    def double(rank, world_size, x):            # at the top level of a module
        return x * 2 * rank

    with Ranks(2) as ranks:
        assert ranks.run(double, 3) == [0, 6]

A start of Python and torch takes seconds. So the processes are forked from one that has imported
both, stay alive, and run one function after another. A function that fails or hangs ends its
processes. The next function gets new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from tests.searching import short_searches

#: Time for the other ranks to end after the first failure.
_GRACE_SECONDS = 5.0
#: Time for a rank to write its stack, on a busy machine.
_STACK_SECONDS = 20.0
#: Time for the start, on a busy machine with few cores.
_START_SECONDS = 180.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OSDP_CACHE_DIR": "",  # no cached profiles: measure in every run
    "OSDP_DEBUG": "1",  # every graph is checked after every pass
}


class RankFailed(AssertionError):
    """A function raised on a rank, its process died, or it timed out; the message says where."""


class Ranks:
    """``world_size`` processes in one process group.

    ``boxed``: graphs run without Inductor (:mod:`tests.boxed`). ``tests/conftest.py`` sets it for
    the time of a test.
    """

    boxed = False

    def __init__(
        self,
        world_size: int,
        cache: Path | None = None,
        preload: str = "tests.imported",
        environment: Mapping[str, str] | None = None,
        backend: str = "gloo",
        device: str = "cpu",
    ) -> None:
        """``cache``: Inductor's cache folder, shared by all ranks (None: Inductor's own).

        ``preload``: the module that the process imports from which ranks are forked. One process
        serves all ``Ranks``: the module of the first start counts.
        ``environment``: variables of the ranks; they override the test defaults.
        ``backend``: of the process group. ``device``: ``"cuda"`` gives each rank a GPU, in turn;
        several ranks may share one.

        The planner evaluates few plans on these ranks (:mod:`tests.searching`).
        """
        self.world_size = world_size
        self._cache = cache
        self._preload = preload
        self._environment = {**_ENVIRONMENT, **(environment or {})}
        self._backend, self._device = backend, device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 400.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(rank, world_size, *args, **kwargs)`` on every rank; results by rank.

        Ranks import ``function`` by its path; arguments and results are pickled.

        Raises:
            RankFailed: with the traceback of every failing rank, and the stack of every rank that
                hangs.
        """
        try:
            if not self._processes:
                self._start()
            for pipe in self._pipes:
                pipe.send((function, args, kwargs, self.boxed))
            return self._collect(timeout_seconds, f"{function.__module__}.{function.__qualname__}")
        except BaseException:
            self.stop(patience_seconds=0.0)
            raise

    def stop(self, patience_seconds: float = 10.0) -> None:
        """End the processes; kill them after the patience. The next :meth:`run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank then ends
        deadline = time.monotonic() + patience_seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._preload])
        self._folder = tempfile.TemporaryDirectory(prefix="osdp-ranks-")
        folder = Path(self._folder.name)
        environment = dict(self._environment)
        if self._cache is not None:
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(self._cache)
        # The first start imports torch for all ranks, and torch reads the environment then.
        with mock.patch.dict(os.environ, environment):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                place = (rank, self.world_size, folder, self._backend, self._device)
                of_rank = (theirs, *place, dict(os.environ))
                process = context.Process(target=_rank_main, args=of_rank, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        self._collect(_START_SECONDS, "starting")

    def _collect(self, timeout_seconds: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        results: list[Any] = [None] * self.world_size
        failed: dict[str, list[int]] = {}  # ranks by error text
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, f"the process died\n{self._log(rank)[-6000:]}"
                if ok:
                    results[rank] = value
                else:
                    failed.setdefault(value, []).append(rank)
                    # The other ranks may wait for this one without end.
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if not waiting and not failed:
            return results
        failures = [
            f"--- rank {', '.join(map(str, ranks))}: {text}" for text, ranks in failed.items()
        ]
        if not failed:
            failures.append(f"no answer after {timeout_seconds:.0f} s")
        failures += [f"--- rank {rank} hangs:\n{self._stack(rank)}" for rank in waiting.values()]
        raise RankFailed(f"{what} on {self.world_size} ranks\n" + "\n".join(failures))

    def _stack(self, rank: int) -> str:
        """The current stack of a rank, innermost frame first, as faulthandler writes it."""
        process = self._processes[rank]
        before, deadline = len(self._log(rank)), time.monotonic() + _STACK_SECONDS
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
        while process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
            if self._log(rank)[before:].endswith("\n"):
                time.sleep(0.5)  # it writes line by line
                break
        return self._log(rank)[before:][:3000]

    def _log(self, rank: int) -> str:
        """The output of a rank, and the trace of a crash."""
        assert self._folder is not None
        return (Path(self._folder.name) / f"rank{rank}.log").read_text(errors="replace")


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    folder: Path,
    backend: str,
    device: str,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # a fork has the environment of the first start
    os.environ.update(environment)
    log = open(folder / f"rank{rank}.log", "w", buffering=1)  # noqa: SIM115 (it stays open)
    os.dup2(log.fileno(), sys.stdout.fileno())
    os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    short_searches().__enter__()  # until the process ends
    try:
        import torch
        import torch._dynamo
        import torch.distributed as dist

        from tests.boxed import without_inductor

        torch.set_num_threads(1)
        if device == "cuda":
            from benchmarks.gpu.share import use_gpu

            use_gpu(rank, world_size)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        pipe.send((True, None))
        while True:
            function, args, kwargs, boxed = pipe.recv()
            torch.manual_seed(0)
            torch._dynamo.reset()
            _forget_models()
            with without_inductor() if boxed else contextlib.nullcontext():
                pipe.send((True, function(rank, world_size, *args, **kwargs)))
            gc.collect()  # free models and optimizers of this function
            gc.freeze()  # what torch keeps of it: walks over all objects would take ever longer
    except EOFError:
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _forget_models() -> None:
    """Do not count models of earlier functions (held by a global or by autograd) as memory."""
    from osdp_compile.engine import first_call
    from osdp_compile.tracking import memory_watch

    memory_watch._watches.clear()
    compiled, earlier = _compiled_models(), weakref.WeakSet(_compiled_models()())
    first_call._compiled = lambda: (model for model in compiled() if model not in earlier)


@functools.cache
def _compiled_models() -> Callable[[], Iterator[Any]]:
    """The original ``first_call._compiled``, before :func:`_forget_models` replaces it."""
    from osdp_compile.engine import first_call

    return first_call._compiled


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
