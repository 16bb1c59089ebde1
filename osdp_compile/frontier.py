"""The frontier: the predicted step time of the best plan under every memory limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from osdp_compile.errors import InfeasibleLimit, OsdpError
from osdp_compile.traced_step import TracedStep
from passes.decisions import Plan
from passes.hardware import Hardware
from passes.units import format_bytes

_POINTS = 10


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Plans by memory limit in bytes, ascending."""

    points: tuple[tuple[int, Plan], ...]

    def draw(self, path: Path) -> None:
        """Step time against memory, as a picture.

        Raises:
            OsdpError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise OsdpError(
                "drawing needs matplotlib: pip install 'osdp-compile[plots]'"
            ) from error
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        gib = float(1 << 30)
        said = [plan.prediction for _, plan in self.points]
        axes.step(
            [limit / gib for limit, _ in self.points],
            [one.step_seconds for one in said if one is not None],
            where="post",
            marker="o",
            label="osdp",
        )
        axes.set(xlabel="memory limit, GiB", ylabel="predicted step, seconds")
        axes.set_ylim(bottom=0)
        figure.savefig(path, dpi=120)


def frontier(
    step: TracedStep,
    ranks: Mapping[str, int],
    hardware: Hardware,
    say: Callable[[str], None] = lambda text: None,
    points: int = _POINTS,
) -> Frontier:
    """Plan for limits from the least that works to what is taken without one, evenly spaced."""
    free = step.plan(ranks, hardware)
    assert free.prediction is not None
    most = free.prediction.peak_bytes
    try:
        least_plan = step.plan(ranks, hardware, 1)
    except InfeasibleLimit as error:
        least = error.least_bytes
    else:
        raise AssertionError(f"a plan that takes one byte: {least_plan}")
    found: list[tuple[int, Plan]] = []
    for index in range(points - 1):
        limit = least + (most - least) * index // (points - 1)
        say(f"limit {format_bytes(limit)}")
        found.append((limit, step.plan(ranks, hardware, limit)))
    return Frontier((*found, (most, free)))
