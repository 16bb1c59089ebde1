"""Step logger: measured and predicted figures of the training step, for a dashboard.

    from torch.utils.tensorboard import SummaryWriter

    logger = StepLogger(model, to_tensorboard(SummaryWriter()))
    logger = StepLogger(model, wandb.init(...).log)             # or Weights & Biases
    for batch in batches:
        train_step(batch)
        logger.step()

``OsdpTrainer`` adds the same figures to the logs of a Hugging Face Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from osdp_compile.errors import OsdpError
from osdp_compile.reports.step_report import report

#: Writes figures by name: ``write(figures, step=12)``.
Write = Callable[..., object]


def step_figures(model: nn.Module) -> dict[str, float]:
    """Figures of a training step by name; empty before the first step, and without a plan.

    Measured ones are there as soon as they are measured: ``osdp/step_seconds`` (the median of the
    last steps), ``osdp/wait_seconds`` (compute waits for communication; on CPUs) and
    ``osdp/peak_bytes`` (on a GPU, since its statistics were reset). Predicted ones are beside them:
    ``osdp/predicted_step_seconds``. ``osdp/memory_limit_bytes``: with a limit.
    """
    try:
        said = report(model)
    except OsdpError:
        return {}
    parts = said.measured_parts
    figures = {
        "step_seconds": said.measured_step_seconds,
        "predicted_step_seconds": said.predicted_step_seconds,
        "wait_seconds": parts.wait_seconds if parts is not None else None,
        "predicted_wait_seconds": said.predicted_exposed_seconds,
        "peak_bytes": said.measured_peak_bytes,
        "predicted_peak_bytes": said.predicted_peak_bytes,
        "memory_limit_bytes": said.memory_limit_bytes,
    }
    return {f"osdp/{name}": float(one) for name, one in figures.items() if one is not None}


def to_tensorboard(writer: Any) -> Write:
    """A function that writes figures with a TensorBoard ``SummaryWriter``."""

    def write(figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return write


class StepLogger:
    """Writes :func:`step_figures` every few steps, on rank 0.

    Args:
        model: the module, or the result of ``torch.compile`` for it.
        write: called as ``write(figures, step=number)``, like the ``log`` of a Weights & Biases
            run; for TensorBoard :func:`to_tensorboard`.
        every: number of steps between two writes.

    Raises:
        ValueError: if ``every`` is below 1.
    """

    def __init__(self, model: nn.Module, write: Write, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every={every}: give the number of steps between two writes")
        self._model, self._write, self._every = model, write, every
        self._steps = 0

    def step(self) -> None:
        """Count a step of the training loop, and write if it is time to."""
        self._steps += 1
        if self._steps % self._every or (dist.is_initialized() and dist.get_rank()):
            return
        figures = step_figures(self._model)
        if figures:
            self._write(figures, step=self._steps)
