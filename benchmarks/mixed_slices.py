"""What mixed slices gain: step time over ten limits, some slices of a weight kept and others not.

    sudo python -m benchmarks.mixed_slices

The model of ``benchmarks.slices``, on two hosts. The limits are evenly spaced from the least that
is feasible to what is taken without one. At each the planner plans with all it knows; and beside
it the fastest plan that decides on all slices of a weight alike, of those with the two linears
whole and in 2, 4 and 8 slices. The two train in turns in the same processes; where they are the
same plan, nothing is gained.

The claim is that the planner's plan is nowhere slower, but for what one and the same plan differs
by from turn to turn.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import in_turns
from benchmarks.claims import conclude
from benchmarks.hosts import hosts_and_cache, parser_for
from benchmarks.launch import measure_on
from benchmarks.slices import COUNTS, WORK
from osdp_compile import Hardware, InfeasibleLimit, Plan
from osdp_compile.cli.argument_types import bytes_of
from osdp_compile.planning.traced_step import TracedStep, predicted, trace
from passes.types.plan import ParameterPlan
from passes.types.units import format_bytes, format_seconds

#: By how much a plan's step differs from turn to turn.
NOISE = 1.03
#: Steps of a turn; the first is not counted.
_STEPS = 3


@dataclasses.dataclass
class Row:
    """A limit, the planner's plan under it, and the fastest with all slices of a weight alike.

    ``mixed_seconds``, ``alike_seconds``: of a step, by turn; empty if it is the same plan.
    """

    limit_bytes: int
    mixed: Plan
    alike: Plan
    mixed_seconds: list[float] = dataclasses.field(default_factory=list)
    alike_seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether both decide the same."""
        return _decided(self.mixed) == _decided(self.alike)

    @property
    def gain(self) -> float:
        """How many times as fast the planner's plan is, measured: the median over turns."""
        if not self.mixed_seconds:
            return 1.0
        pairs = zip(self.alike_seconds, self.mixed_seconds, strict=True)
        return statistics.median(alike / mixed for alike, mixed in pairs)

    @property
    def predicted_gain(self) -> float:
        """The same as it was predicted."""
        return predicted(self.alike).step_seconds / predicted(self.mixed).step_seconds

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "limit_bytes": self.limit_bytes,
            "mixed": [_sliced(self.mixed), self.mixed_seconds],
            "alike": [_sliced(self.alike), self.alike_seconds],
            "predicted_gain": self.predicted_gain,
            "gain": self.gain,
        }


def _decided(plan: Plan) -> list[tuple[object, ...]]:
    return [(row.decision, row.slices, row.along, row.kept_slices) for row in plan.parameters]


def planned(
    step: TracedStep, hosts: int, hardware: Hardware, points: int, most_bytes: int | None
) -> Iterator[Row]:
    """The limits, up to one or to what is taken without one, each with its two plans."""
    ranks = {"ranks": hosts}
    least_bytes = step.least_bytes(ranks, hardware)
    if most_bytes is None:
        most_bytes = predicted(step.plan(ranks, hardware)).peak_bytes
    for index in range(points):
        limit_bytes = least_bytes + (most_bytes - least_bytes) * index // max(points - 1, 1)
        found = []
        for slices in COUNTS:
            by_hand = (("inner.up.weight", slices, 0),) if slices > 1 else ()
            try:
                one = dataclasses.replace(step, slices=by_hand).plan(ranks, hardware, limit_bytes)
            except InfeasibleLimit:
                continue
            found.append(one)
        mixed = step.plan(ranks, hardware, limit_bytes)
        alike = min(found, key=lambda one: predicted(one).step_seconds, default=mixed)
        yield Row(limit_bytes, mixed, alike)


def _sliced(plan: Plan) -> str:
    """What a plan does with the weights that are large."""
    large = [row for row in plan.parameters if len(row.shape) > 1]
    return ", ".join(f"{row.name}: {_said(row)}" for row in large)


def _said(row: ParameterPlan) -> str:
    kept = f", {row.kept_slices} kept" if row.kept_slices else ""
    return row.decision.name + (f" in {row.slices}{kept}" if row.slices > 1 else "")


def table(rows: list[Row]) -> Table:
    """For people."""
    made = Table(title="mixed slices beside slices all alike")
    for head in ("limit", "mixed", "alike", "gain", "predicted"):
        made.add_column(head, justify="right")
    made.add_column("plan")
    for row in rows:
        measured = [
            format_seconds(statistics.median(one)) if one else "same"
            for one in (row.mixed_seconds, row.alike_seconds)
        ]
        made.add_row(
            format_bytes(row.limit_bytes),
            *measured,
            f"{row.gain:.2f}",
            f"{row.predicted_gain:.2f}",
            _sliced(row.mixed),
        )
    return made


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--points", type=int, default=10, help="limits")
    parser.add_argument("--most", type=bytes_of, help="the largest limit, as 345MiB")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("mixed_slices.json"))
    given = parser.parse_args()
    console = Console()
    rows: list[Row] = []
    with hosts_and_cache(given.hosts, given.rate) as (hosts, cache):
        measure_on(hosts, WORK, "osdp", "least", {}, cache, cache / "profiles")
        (kept,) = (cache / "profiles").glob("*.json")
        hardware = Hardware.load(kept)
        step = trace(WORK.model(), WORK.inputs_of(0), optimizer="adamw")
        for row in planned(step, given.hosts, hardware, given.points, given.most):
            console.print(f"[dim]{format_bytes(row.limit_bytes)}: {_sliced(row.mixed)}[/dim]")
            if not row.same:
                plans = [row.mixed, row.alike]
                row.mixed_seconds, row.alike_seconds = in_turns.measure(
                    hosts, WORK, plans, hardware, given.turns, _STEPS, cache
                )
            rows.append(row)
    console.print(table(rows))
    slowest = min(row.gain for row in rows)
    claim = (
        f"mixed slices are at no limit more than {NOISE - 1:.0%} slower ({slowest:.2f}); "
        f"at best {max(row.gain for row in rows):.2f} times as fast"
    )
    record = {"rows": [row.record() for row in rows]}
    conclude(console, {claim: slowest >= 1 / NOISE}, record, given.out)


if __name__ == "__main__":
    main()
