"""Frontier: predicted step time of the best plan over a range of memory limits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from osdp_compile.figures import byte_unit_of, new_figure, time_unit_of
from osdp_compile.options import Search
from osdp_compile.planning.traced_step import TracedStep, predicted
from passes.types.hardware import Hardware
from passes.types.plan import Plan
from passes.types.units import format_bytes

_POINTS = 10
#: Factor to the fastest step within which a plan ends the search for faster ones.
_AS_FAST = 1.005


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Plans by memory limit in bytes, ascending."""

    points: tuple[tuple[int, Plan], ...]

    def draw(self, path: Path, others: Mapping[str, Plan]) -> None:
        """Plot step time against memory into a file; ``others``: name -> plan, as markers.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        figure = new_figure("--frontier", 8, 5)
        axes = figure.add_subplot()
        every = [*(plan for _, plan in self.points), *others.values()]
        byte, byte_name = byte_unit_of(max(predicted(plan).peak_bytes for plan in every))
        second, second_name = time_unit_of(max(predicted(plan).step_seconds for plan in every))
        axes.step(
            [limit * byte for limit, _ in self.points],
            [predicted(plan).step_seconds * second for _, plan in self.points],
            where="post",
            marker="o",
            label="osdp",
        )
        for number, (name, plan) in enumerate(others.items(), start=1):  # C0 is osdp's colour
            said = predicted(plan)
            at = said.peak_bytes * byte, said.step_seconds * second
            axes.scatter(*at, marker="s", color=f"C{number}", label=name)
        axes.set_xlabel(f"memory limit of osdp, peak of the others, {byte_name}")
        axes.set_ylabel(f"predicted step, {second_name}")
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.legend()
        figure.savefig(path, dpi=120)


def frontier(
    step: TracedStep,
    ranks: Mapping[str, int],
    hardware: Hardware,
    say: Callable[[str], None] = lambda text: None,
    points: int = _POINTS,
    search: Search = "quick",
) -> Frontier:
    """Plans for limits as in :func:`each_by_itself`; each plan counts for all limits it fits.

    If the search under a higher limit finds a slower plan, the plan of a lower limit stands, so
    more memory is never slower. It stays a plan for its own limit, because with more memory its
    collectives would be scheduled differently from the prediction.
    """
    found: list[tuple[int, Plan]] = []
    for limit, plan in each_by_itself(step, ranks, hardware, say, points, search, True):
        before = found[-1][1] if found else plan
        slower = predicted(before).step_seconds < predicted(plan).step_seconds
        found.append((limit, before if slower else plan))
    return Frontier(tuple(found))


def each_by_itself(
    step: TracedStep,
    ranks: Mapping[str, int],
    hardware: Hardware,
    say: Callable[[str], None] = lambda text: None,
    points: int = _POINTS,
    search: Search = "quick",
    until_fast: bool = False,
) -> list[tuple[int, Plan]]:
    """Plans for evenly spaced limits, from the lowest feasible one to the peak without a limit.

    ``until_fast``: the first plan within 0.5 % of the step time without a limit stands for all
    higher limits. A thorough search evaluates its limit grid once for all limits.
    """
    if search == "thorough":
        searched = step.monotone_search(ranks, hardware, say)
        most, least = predicted(searched.free).peak_bytes, searched.least.peak_bytes
        return [(limit, searched.plan(limit)) for limit in _spaced(least, most, points)]
    started = time.perf_counter()
    say("without a limit, and the least limit")
    free = step.plan(ranks, hardware)
    most = predicted(free).peak_bytes
    limits = _spaced(step.least_bytes(ranks, hardware), most, points)[:-1]
    found: list[tuple[int, Plan]] = []
    began = time.perf_counter()
    for number, limit in enumerate(limits, 1):
        each = (time.perf_counter() - began) / len(found) if found else began - started
        left = max(1, round(each * (len(limits) - len(found))))
        say(f"limit {number} of {len(limits)}, {format_bytes(limit)}, about {left} s left")
        found.append((limit, step.plan(ranks, hardware, limit)))
        seconds = predicted(found[-1][1]).step_seconds
        if until_fast and seconds <= _AS_FAST * predicted(free).step_seconds:
            found += [(higher, found[-1][1]) for higher in limits[number:]]
            break
    return [*found, (most, free)]


def _spaced(least: int, most: int, points: int) -> list[int]:
    return [least + (most - least) * index // (points - 1) for index in range(points)]
