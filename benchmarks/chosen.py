"""Is the plan that the planner chooses the fastest, measured? Beside random and uniform plans.

    sudo python -m benchmarks.chosen                          # 30 random plans, three limits
    sudo python -m benchmarks.chosen --random 3 --limits 1    # a short one

A GPT small enough for many plans trains on two hosts (network namespaces on this machine, one
thread each). Machine and network are measured once, as at any first call. At each limit the
planner plans with that; random plans are drawn until enough fit by the simulator's prediction
(``benchmarks/random_plans.py``); so do the uniform plans that fit.

*Screening.* All of them train in turns in the same processes, a few steps each, in another order
every round. *Final.* The least of thirty noisy medians is below the truth, so it is not compared
with. The planner's plan and the five that were fastest train again, in fresh processes and more
rounds, and a plan's ratio is the median over rounds of the planner's step over its own. The claim
is on the worst of these five ratios. That still leans against the planner, and how much is
chance is seen from a control: the planner's plan is there twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import in_turns
from benchmarks.hosts import Hosts, HostsError
from benchmarks.launch import measure_on
from benchmarks.random_plans import random_plans
from benchmarks.train import Work
from osdp_compile import Hardware, Plan
from osdp_compile.traced_step import TracedStep, trace
from passes.decisions import FLAT_DECISIONS
from passes.units import format_bytes, format_seconds

#: What the project promises: how much slower the planner's plan is than any other, at most.
NEAR = 1.03
PLANNER, CONTROL = "planner", "planner, again"
#: How many of the others are measured once more.
_FINALISTS = 5
#: Steps of a turn; the first is not counted.
_STEPS = 4


@dataclasses.dataclass
class Row:
    """A plan and what was measured of it. ``screened``, ``final``: seconds of a step, by round."""

    name: str
    plan: Plan
    screened: list[float] = dataclasses.field(default_factory=list)
    final: list[float] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """In screening."""
        return statistics.median(self.screened)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        assert self.plan.prediction is not None
        return {
            "name": self.name,
            "decisions": {row.name: row.decision.value for row in self.plan.parameters},
            "recompute": self.plan.recompute,
            "bucket_bytes": self.plan.bucket_bytes,
            "predicted_seconds": self.plan.prediction.step_seconds,
            "predicted_bytes": self.plan.prediction.peak_bytes,
            "screened": self.screened,
            "final": self.final,
        }


@dataclasses.dataclass
class Level:
    """A limit, and the plans that were measured under it: the planner's first."""

    limit_bytes: int
    rows: list[Row]
    seconds: float = 0.0  # that all of it took

    @property
    def planner(self) -> Row:
        return self.rows[0]

    @property
    def finalists(self) -> list[Row]:
        return [row for row in self.rows[1:] if row.final and row.name != CONTROL]

    def ratio(self, row: Row) -> float:
        """Of the planner's step to another's, in the final: the median of the rounds' own."""
        pairs = zip(self.planner.final, row.final, strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    @property
    def worst(self) -> float:
        """Above one: so much faster was another plan."""
        return max(self.ratio(row) for row in self.finalists)

    @property
    def control(self) -> float:
        """The ratio of the planner's plan to itself."""
        return next(self.ratio(row) for row in self.rows if row.name == CONTROL)


def candidates(step: TracedStep, ranks: dict[str, int], hardware: Hardware, level: Level) -> None:
    """Add the uniform plans to a level that fit."""
    for decision in FLAT_DECISIONS:
        plan = step.uniform(decision, ranks, hardware, level.limit_bytes)
        assert plan.prediction is not None
        if plan.prediction.peak_bytes <= level.limit_bytes:
            level.rows.append(Row(f"all {decision.value}", plan))


def measure(
    hosts: Hosts, work: Work, count: int, limits: int, turns: tuple[int, int], console: Console
) -> list[Level]:
    """Everything. ``turns``: of screening, and of the final."""
    levels = []
    ranks = {"ranks": hosts.ranks}
    step = trace(work.model(), work.inputs_of(0), optimizer="adamw")
    with tempfile.TemporaryDirectory(prefix="osdp-bench-cache") as name:
        cache, profiles = Path(name) / "cache", Path(name) / "profiles"
        measure_on(hosts, work, "osdp", "least", {}, cache, profiles)
        (kept,) = profiles.glob("*.json")
        hardware = Hardware.load(kept)
        for limit_bytes in _limits(step, ranks, hardware, limits):
            began = time.monotonic()
            plan = step.plan(ranks, hardware, limit_bytes)
            level = Level(limit_bytes, [Row(PLANNER, plan)])
            candidates(step, ranks, hardware, level)
            ctx = step.context(ranks, hardware, limit_bytes)
            drawn = random_plans(step, ctx, count, seed=limit_bytes)
            level.rows += [Row(f"random {i}", plan) for i, plan in enumerate(drawn, 1)]
            console.print(
                f"[dim]limit {format_bytes(limit_bytes)}: {len(level.rows)} plans, "
                f"{len(drawn)} of them random, made in {time.monotonic() - began:.0f} s[/dim]"
            )

            def train(rows: Sequence[Row], rounds: int) -> list[list[float]]:
                plans = [row.plan for row in rows]
                return in_turns.measure(hosts, work, plans, hardware, rounds, _STEPS, cache)

            for row, seconds in zip(level.rows, train(level.rows, turns[0]), strict=True):
                row.screened = seconds
            console.print(f"[dim]screened after {time.monotonic() - began:.0f} s[/dim]")
            others = sorted(level.rows[1:], key=lambda row: row.seconds)[:_FINALISTS]
            again = Row(CONTROL, plan)
            last = [level.planner, *others, again]
            for row, seconds in zip(last, train(last, turns[1]), strict=True):
                row.final = seconds
            level.rows.append(again)
            level.seconds = time.monotonic() - began
            levels.append(level)
            console.print(table(level))
    return levels


def _limits(step: TracedStep, ranks: dict[str, int], hardware: Hardware, count: int) -> list[int]:
    """Evenly from above the least that is feasible to what is taken without one."""
    free = step.plan(ranks, hardware).prediction
    assert free is not None
    least = step.least_bytes(ranks, hardware)
    return [least + (free.peak_bytes - least) * i // count for i in range(1, count + 1)]


def table(level: Level) -> Table:
    """For people: the plans of a level, the fastest first."""
    made = Table(title=f"limit {format_bytes(level.limit_bytes)}, {level.seconds:.0f} s")
    made.add_column("plan")
    for head in ("predicted", "peak", "screened", "final", "planner / it"):
        made.add_column(head, justify="right")
    made.add_column("decisions")
    for row in sorted(level.rows, key=lambda row: statistics.median(row.final or row.screened)):
        assert row.plan.prediction is not None
        decisions = [one.decision.value for one in row.plan.parameters]
        words = [f"{decisions.count(one)} {one}" for one in sorted(set(decisions))]
        if row.plan.recompute:
            words.append(f"{len(row.plan.recompute)} recomputed")
        made.add_row(
            row.name,
            format_seconds(row.plan.prediction.step_seconds),
            format_bytes(row.plan.prediction.peak_bytes),
            format_seconds(row.seconds) if row.screened else "",
            format_seconds(statistics.median(row.final)) if row.final else "",
            f"{level.ratio(row):.3f}" if row.final and row is not level.planner else "",
            ", ".join(words),
        )
    return made


def claims(levels: Sequence[Level]) -> dict[str, bool]:
    """What the project promises of the planner's choice, and whether it holds here."""
    return {
        f"limit {format_bytes(level.limit_bytes)}: within {NEAR - 1:.0%} of the best "
        f"({level.worst - 1:+.1%}; the same plan twice: {level.control - 1:+.1%})": (
            level.worst <= NEAR
        )
        for level in levels
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="400mbit", help="what each host may send")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a rank")
    parser.add_argument("--random", type=int, default=30, help="random plans at each limit")
    parser.add_argument("--limits", type=int, default=3)
    parser.add_argument("--screening", type=int, default=4, help="rounds of all plans")
    parser.add_argument("--final", type=int, default=12, help="rounds of the fastest")
    parser.add_argument("--out", type=Path, default=Path("chosen.json"))
    given = parser.parse_args()
    work = Work(layers=given.layers, width=given.width, batch=given.batch)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    turns = (given.screening, given.final)
    try:
        with Hosts(given.hosts, given.rate) as hosts:
            levels = measure(hosts, work, given.random, given.limits, turns, console)
    except HostsError as error:
        sys.exit(str(error))
    held = claims(levels)
    for claim, holds in held.items():
        console.print(("[green]yes[/green] " if holds else "[red]no[/red]  ") + claim)
    record = {
        "torch": torch.__version__,
        "hosts": given.hosts,
        "rate": given.rate,
        "work": dataclasses.asdict(work),
        "limits": [
            {
                "limit_bytes": level.limit_bytes,
                "seconds": level.seconds,
                "ratio": level.worst,
                "control": level.control,
                "plans": [row.record() for row in level.rows],
            }
            for level in levels
        ],
        "claims": held,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"[dim]saved {given.out}[/dim]")
    if not all(held.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
