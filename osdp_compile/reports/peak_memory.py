"""Measured memory: every tensor byte alive in this process."""

from __future__ import annotations

from types import TracebackType

import torch

from osdp_compile.reports.cpu_memory import start_counting, stop_counting


class PeakMemory:
    """Context manager: the most tensor bytes alive at once since it was entered.

    Enter it before the model is built, so that everything is counted. On CUDA torch's
    allocator counts; on the CPU one that is put before it, for which a small library is compiled
    at the first use.

    ``peak_bytes``, ``current_bytes``: valid after leaving. On the CPU, what lived before
    entering is in neither, dead or alive; on CUDA it counts as negative once freed.

    Raises:
        OsdpError: on entering, inside another one on the CPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.peak_bytes = 0
        self.current_bytes = 0
        self._before_bytes = 0

    def __enter__(self) -> PeakMemory:
        self.peak_bytes = self.current_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before_bytes = torch.cuda.memory_allocated(self.device)
        else:
            start_counting()
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
        else:
            self.peak_bytes, self.current_bytes = stop_counting()
