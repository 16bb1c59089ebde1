"""Operators in slices: what they spare, what they cost, and a limit that only they keep.

    sudo python -m benchmarks.slices          # one layer, 1024 to 16384 and back, 400 Mbit/s

A model of one wide layer (33.6 M parameters) trains on two hosts with its two linears whole, in
2, 4 and 8 slices: each under the least limit that is feasible so, where its peak is measured, and
without a limit and under the least limit of the whole one, where its steps are timed, in turns.
Then the planner is given a limit that no plan of whole operators keeps; FSDP2's peak and the losses
of DDP stand beside it.

*Transient* is the peak above what a rank holds between steps (parameters and Adam's state, all
sharded).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.claims import conclude
from benchmarks.compare import LOSS_TOLERANCE
from benchmarks.hosts import Hosts, hosts_and_cache, parser_for
from benchmarks.launch import measure_on
from benchmarks.train import Work
from passes.types.units import format_bytes

COUNTS = (1, 2, 4, 8)
#: What the project promises: how near the prediction is, and how much slower four slices are.
NEAR, NO_SLOWER = 0.05, 1.05
#: The same, but for what a slice's bookkeeping takes.
SAME = 1.001
WORK = Work(task="wide layer", warmup_steps=2, timed_steps=5)


@dataclasses.dataclass
class Row:
    """What was measured with so many slices; ``steps``: medians by round, of the slowest rank.

    ``steps``: without a limit, then under the least limit of whole operators.
    """

    slices: int
    least_bytes: int
    peak_bytes: int
    predicted_bytes: int
    steps: tuple[list[float], list[float]] = dataclasses.field(default_factory=lambda: ([], []))

    @property
    def options(self) -> dict[str, Any]:
        return {"slices": 1 if self.slices == 1 else {"*up.weight": self.slices}}


@dataclasses.dataclass
class Only:
    """A limit that no plan of whole operators keeps, and what trains under it.

    ``fsdp2_bytes``: FSDP2's peak with every linear sharded for itself, and with the block as one.
    """

    limit_bytes: int
    peak_bytes: int
    step_seconds: float
    fsdp2_bytes: tuple[int, int]
    ddp_seconds: float
    loss_difference: float


def state_bytes(work: Work, ranks: int) -> int:
    """Parameters and Adam's state of the rank that has most, all sharded."""
    return sum(
        3 * -(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) * p.element_size()
        for p in work.model().parameters()
    )


def measure(hosts: Hosts, repeats: int, cache: Path, console: Console) -> tuple[list[Row], Only]:
    """All of it."""

    def got(way: str, phase: str, options: dict[str, Any]) -> dict[str, Any]:
        console.print(f"[dim]{way}, {phase}, {options}[/dim]")
        return measure_on(hosts, WORK, way, phase, options, cache)

    rows: list[Row] = []
    for slices in COUNTS:
        row = Row(slices, 0, 0, 0)
        row.least_bytes = got("osdp", "least", {**row.options, "memory_limit": 1})["least_bytes"]
        found = got("osdp", "memory", {**row.options, "memory_limit": row.least_bytes})
        row.peak_bytes = found["peak_bytes"]
        row.predicted_bytes = found["predicted"]["peak_bytes"]
        rows.append(row)
    for _ in range(repeats):
        for row in rows:
            for steps, limit in zip(
                row.steps, ({}, {"memory_limit": rows[0].least_bytes}), strict=True
            ):
                steps.append(got("osdp", "time", {**row.options, **limit})["step_seconds"])
    least_bytes = got("osdp", "least", {"memory_limit": 1})["least_bytes"]
    limit_bytes = (least_bytes + rows[0].least_bytes) // 2
    limited = {"memory_limit": limit_bytes}
    ours, ddp = got("osdp", "time", limited), got("DDP", "time", {})
    only = Only(
        limit_bytes,
        got("osdp", "memory", limited)["peak_bytes"],
        ours["step_seconds"],
        (
            got("FSDP2", "memory", {})["peak_bytes"],
            got("FSDP2 as one", "memory", {})["peak_bytes"],
        ),
        ddp["step_seconds"],
        max(abs(a - b) for a, b in zip(ours["losses"], ddp["losses"], strict=True)),
    )
    return rows, only


def claims(rows: list[Row], only: Only, held_bytes: int) -> dict[str, bool]:
    """What the project promises, and whether it holds here."""
    transient = [row.peak_bytes - held_bytes for row in rows]
    off = [
        abs((row.peak_bytes - held_bytes) / (row.predicted_bytes - held_bytes) - 1) for row in rows
    ]
    whole, four = rows[0], next(row for row in rows if row.slices == 4)
    slower = [
        statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(four.steps, whole.steps, strict=True)
    ]
    return {
        "the more slices, the less memory, until the optimizer's step takes the most": all(
            more <= SAME * fewer for fewer, more in itertools.pairwise(transient)
        )
        and transient[-1] < transient[0],
        f"transient memory within {NEAR:.0%} of the prediction ({max(off):.1%})": max(off) <= NEAR,
        f"four slices at most {NO_SLOWER - 1:.0%} slower ({slower[0] - 1:+.1%} without a limit, "
        f"{slower[1] - 1:+.1%} under the least one of whole operators)": max(slower) <= NO_SLOWER,
        "a limit below FSDP2's peaks (each linear "
        f"{format_bytes(only.fsdp2_bytes[0])}, the block {format_bytes(only.fsdp2_bytes[1])}) and "
        f"what whole operators need ({format_bytes(whole.least_bytes)}): "
        f"{format_bytes(only.peak_bytes)} of {format_bytes(only.limit_bytes)}": only.peak_bytes
        <= only.limit_bytes
        < min(*only.fsdp2_bytes, whole.least_bytes),
        f"losses there are DDP's ({only.loss_difference:.1e})": only.loss_difference
        <= LOSS_TOLERANCE,
    }


def table(rows: list[Row], held_bytes: int) -> Table:
    """For people."""
    made = Table(title=f"one wide layer; {format_bytes(held_bytes)} held between steps")
    for head in (
        *("slices", "least limit", "peak", "transient", "predicted"),
        *("step s, no limit", "step s, least limit of whole"),
    ):
        made.add_column(head, justify="right")
    for row in rows:
        made.add_row(
            str(row.slices),
            format_bytes(row.least_bytes),
            format_bytes(row.peak_bytes),
            format_bytes(row.peak_bytes - held_bytes),
            format_bytes(row.predicted_bytes - held_bytes),
            *(f"{statistics.median(steps):.3f}" for steps in row.steps),
        )
    return made


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("slices.json"))
    given = parser.parse_args()
    console = Console()
    with hosts_and_cache(given.hosts, given.rate) as (hosts, cache):
        rows, only = measure(hosts, given.repeats, cache, console)
    held_bytes = state_bytes(WORK, given.hosts)
    console.print(table(rows, held_bytes))
    console.print(
        f"under {format_bytes(only.limit_bytes)}: {only.step_seconds:.3f} s a step, "
        f"{format_bytes(only.peak_bytes)} at the peak (DDP: {only.ddp_seconds:.3f} s)"
    )
    record = {
        "state_bytes": held_bytes,
        "rows": [dataclasses.asdict(row) for row in rows],
        "only": dataclasses.asdict(only),
    }
    conclude(console, claims(rows, only, held_bytes), record, given.out)


if __name__ == "__main__":
    main()
