"""Learning: compare measured training steps with their prediction, and keep the difference.

The steady steps of a model's training (``step_trace.py``) correct the kept profile of the machine,
for the next start of the same model on the same ranks. Rank 0 decides and writes. A profile that
the user gives learns nothing, and neither does one that is not kept on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.optim import Optimizer

from osdp_compile.calibration.evidence import (
    MeasuredStep,
    is_systematic,
    learned_from,
    typical,
)
from osdp_compile.tracking.session import Session, find
from osdp_compile.tracking.step_trace import StepTraces
from passes.annotate.training_state import optimizer_seconds
from passes.types.learned import Learned
from passes.types.units import format_seconds

log = logging.getLogger("osdp_compile")

#: Keeps corrections in the profile; returns its file, or None if it is not kept on disk.
Keep = Callable[[Learned], Path | None]


def trace_steps(session: Session, keep: Keep | None) -> None:
    """Trace a few steps of a model for its reports; learn from them if there is ``keep``."""

    def holds(optimizer: Optimizer) -> bool:
        found = [find(group["params"][0]) for group in optimizer.param_groups if group["params"]]
        return any(one is not None and one[1] is session for one in found)

    def done(steps: Sequence[MeasuredStep]) -> None:
        if keep is not None:
            _learn(typical(steps), session, keep)

    session.observed.traces = StepTraces(holds, done)


def _learn(step: MeasuredStep, session: Session, keep: Keep) -> None:
    """Keep the difference between a measured step and its prediction, if there is one."""
    update_seconds = optimizer_seconds(session.context, session.plan)
    if not is_systematic(step, update_seconds):
        return
    learned = learned_from(step, update_seconds, session.context.hardware.in_force)
    path = keep(learned)
    if path is not None:
        predicted = sum(one.step_seconds for one in session.observed.graphs[0].timelines.values())
        log.info(
            "learned from %d steps, predicted %s and measured %s: %s. The next start of this model "
            "plans with it; kept in %s",
            learned.steps,
            format_seconds(predicted + update_seconds),
            format_seconds(step.step_seconds),
            learned,
            path,
        )
