"""Two ranks train a GPT with DDP and with osdp: the same losses, over gloo and over NCCL.

Where there is one GPU the ranks share it, so step times say nothing there.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.share import NCCL
from benchmarks.launch import kept_code, measure_on
from benchmarks.processes import Processes, RanksError
from benchmarks.train import Work

#: How far a loss may be from DDP's: rounding, grown over the steps.
LOSS_TOLERANCE = 1e-4
#: Of osdp's peak without a limit; in a dry run of DDP's.
_LIMIT_SHARE, _DRY_SHARE = 0.75, 0.6


@dataclasses.dataclass
class Outcome:
    """One way to train over one backend.

    ``difference``: the largest distance of a loss from DDP's over gloo.
    """

    backend: str
    way: str
    peak_bytes: int = 0
    limit_bytes: int | None = None
    predicted_bytes: int | None = None
    difference: float | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    failed: str = ""

    @property
    def holds(self) -> bool:
        """Whether the losses are DDP's, and the peak within the limit."""
        kept = self.limit_bytes is None or self.peak_bytes <= self.limit_bytes
        return kept and self.difference is not None and self.difference <= LOSS_TOLERANCE


def measure(
    device: str, dry: bool, deadline: Deadline, profiles: Path | None = None
) -> list[Outcome]:
    """DDP and osdp over gloo, and osdp over NCCL if the device is a GPU.

    ``dry``: a small model, only under a limit. ``profiles``: as for :func:`measure_on`. A
    training that the deadline ends has failed.
    """
    work = Work(device=device, warmup_steps=0)
    if dry:
        work = dataclasses.replace(work, layers=1, width=256, context=64)
    outcomes = [_measured(work, deadline, "gloo", "DDP", {}, None)]
    reference, ddp_bytes = outcomes[0].losses, outcomes[0].peak_bytes
    if dry:
        options = {"memory_limit": int(_DRY_SHARE * ddp_bytes)}
        return [*outcomes, _measured(work, deadline, "gloo", "osdp", options, reference, profiles)]
    for backend in ("gloo", NCCL) if device == "cuda" else ("gloo",):
        free = _measured(work, deadline, backend, "osdp", {}, reference, profiles)
        outcomes.append(free)
        if not free.failed:
            limit_bytes = int(_LIMIT_SHARE * free.peak_bytes)
            options = {"memory_limit": limit_bytes}
            under = _measured(work, deadline, backend, "osdp", options, reference, profiles)
            outcomes.append(under)
    return outcomes


def _measured(
    work: Work,
    deadline: Deadline,
    backend: str,
    way: str,
    options: dict[str, Any],
    reference: list[float] | None,
    profiles: Path | None = None,
) -> Outcome:
    outcome = Outcome(backend, way, limit_bytes=options.get("memory_limit"))
    with tempfile.TemporaryDirectory(prefix="osdp-bench") as folder, Processes(2, backend) as ranks:
        try:
            cache = kept_code(Path(folder))
            found = measure_on(
                ranks, work, way, "memory", options, cache, profiles, deadline.left_seconds()
            )
        except RanksError as error:
            outcome.failed = str(error)
            return outcome
    outcome.losses, outcome.peak_bytes = found["losses"], found["peak_bytes"]
    outcome.predicted_bytes = found.get("predicted", {}).get("peak_bytes")
    pairs = zip(outcome.losses, reference or outcome.losses, strict=True)
    outcome.difference = max(abs(one - other) for one, other in pairs)
    return outcome
