"""Learned values: what measured training steps correct in the prices of a hardware profile."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from msgspec import Meta

from passes.types.units import format_seconds

#: Bounds of the factors. They keep a factor invertible, and a plan independent of a broken clock.
LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0
Factor = Annotated[float, Meta(ge=LEAST_FACTOR, le=MOST_FACTOR)]


@dataclasses.dataclass(frozen=True)
class Learned:
    """Corrections for one training step; a factor is the measured time over the profile's.

    Attributes:
        steps: number of measured steps behind the values; 0: nothing is learned.
        kernel_factor: for kernels of torch's own, such as matrix products.
        fused_factor: for all other kernels of the graphs.
        overhead_factor: for the compute time that concurrent communication takes.
        network_factor: for collectives on the network; below 1, they are faster than measured.
        lateness: the wait for the slowest rank. A collective that starts on an idle network ends
            later by this share of the time since the last one ended.
        update_factor: for the optimizer's step.
        loop_seconds: time of a step outside its graphs and its optimizer, as for the next batch.
    """

    steps: Annotated[int, Meta(ge=0)] = 0
    kernel_factor: Factor = 1.0
    fused_factor: Factor = 1.0
    overhead_factor: Factor = 1.0
    network_factor: Factor = 1.0
    lateness: Annotated[float, Meta(ge=0)] = 0.0
    update_factor: Factor = 1.0
    loop_seconds: Annotated[float, Meta(ge=0)] = 0.0

    def __str__(self) -> str:
        return (
            f"torch's kernels x{self.kernel_factor:.2f}, other kernels x{self.fused_factor:.2f}, "
            f"compute overhead of collectives x{self.overhead_factor:.2f}, collectives "
            f"x{self.network_factor:.2f}, ranks late by {self.lateness:.0%}, "
            f"optimizer x{self.update_factor:.2f}, "
            f"training loop {format_seconds(self.loop_seconds)}"
        )
