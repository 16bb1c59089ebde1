"""Measured memory: every tensor byte alive in this process."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class PeakMemory:
    """Context manager: the most tensor bytes alive at once since it was entered.

    Enter it before the model is built, so that everything is counted. On CUDA the
    allocator counts; on the CPU the profiler's allocation events are added up, which
    slows a step down: measure time without it.

    ``peak_bytes``, ``current_bytes``: valid after leaving. On the CPU, what lived before
    entering is in neither, dead or alive; on CUDA it counts as negative once freed. On the
    CPU, memory freed by a thread of a communication library counts until it is given out
    again: the figures may be a little high, not low.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.peak_bytes = 0
        self.current_bytes = 0
        self._profile: profile | None = None
        self._before_bytes = 0

    def __enter__(self) -> PeakMemory:
        self.peak_bytes = self.current_bytes = 0
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
        alive = _Alive()
        for _, address, change in sorted(_allocations(finished), key=lambda event: event[0]):
            if change > 0:
                alive.allocate(address, change)
            else:
                alive.free(address)
            self.peak_bytes = max(self.peak_bytes, alive.total_bytes)
        self.current_bytes = alive.total_bytes


def _allocations(finished: profile) -> Iterator[tuple[int, int, int]]:
    """When, at what address, how many bytes (below zero: freed); in no order."""
    inner = finished.profiler
    assert inner is not None and inner.kineto_results is not None
    pending: list[Any] = list(inner.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        kind, fields = event.typed
        if kind.name == "Allocation" and fields.device.type == "cpu":
            yield event.start_time_ns, fields.ptr, fields.alloc_size


class _Alive:
    """Blocks of memory that are in use."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._starts: list[int] = []  # sorted
        self._sizes: dict[int, int] = {}

    def allocate(self, address: int, size_bytes: int) -> None:
        # What is given out again was freed without an event: by a thread that is not
        # profiled. gloo's workers are such; they drop a collective's input after its end.
        first = bisect.bisect_left(self._starts, address)
        if first and self._starts[first - 1] + self._sizes[self._starts[first - 1]] > address:
            first -= 1
        while first < len(self._starts) and self._starts[first] < address + size_bytes:
            self.free(self._starts[first])
        self._starts.insert(first, address)
        self._sizes[address] = size_bytes
        self.total_bytes += size_bytes

    def free(self, address: int) -> None:
        size_bytes = self._sizes.pop(address, None)
        if size_bytes is None:
            return  # it lived before the profiler
        del self._starts[bisect.bisect_left(self._starts, address)]
        self.total_bytes -= size_bytes
