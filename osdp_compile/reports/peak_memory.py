"""Peak memory: measure the tensor bytes alive in this process."""

from __future__ import annotations

from types import TracebackType

import torch

from osdp_compile.reports.cpu_memory import start_counting, stop_counting


class PeakMemory:
    """Context manager: the peak of tensor bytes alive since it was entered.

    Enter it before the model is built, so that everything is counted. On CUDA torch's allocator
    counts. On the CPU an allocator in front of torch's counts; its small library is compiled at
    the first use. On the CPU, tensors from before the entry are in neither figure. On CUDA such a
    tensor counts as negative once it is freed.

    Raises:
        OsdpError: on entry, inside another ``PeakMemory`` on the CPU.

    Attributes:
        peak_bytes: the peak, valid after the exit.
        current_bytes: the bytes that are alive at the exit.
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
