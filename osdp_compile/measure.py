"""Measured memory: every tensor byte alive in this process."""

from __future__ import annotations

from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile


class PeakMemory:
    """Context manager: the most tensor bytes alive at once since it was entered.

    Enter it before the model is built, so that everything is counted. On CUDA the
    allocator counts; on the CPU the profiler's allocation events are added up, which
    slows a step down: measure time without it.

    ``peak_bytes``, ``current_bytes``: valid after leaving; what lived before entering
    is not in them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.peak_bytes = 0
        self.current_bytes = 0
        self._profile: profile | None = None
        self._before_bytes = 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before_bytes = torch.cuda.memory_allocated(self.device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before_bytes
            self.current_bytes = torch.cuda.memory_allocated(self.device) - self._before_bytes
            return
        assert self._profile is not None
        self._profile.__exit__(kind, error, trace)
        if error is None:
            self._add_up(self._profile)
        self._profile = None

    def _add_up(self, finished: profile) -> None:
        inner = finished.profiler
        assert inner is not None and inner.kineto_results is not None
        changes = [
            (event.start_ns(), event.nbytes())
            for event in inner.kineto_results.events()
            if event.name() == "[memory]" and event.device_type().name == "CPU"
        ]
        changes.sort(key=lambda change: change[0])
        alive = 0
        for _, change in changes:
            alive += change
            self.peak_bytes = max(self.peak_bytes, alive)
        self.current_bytes = alive
