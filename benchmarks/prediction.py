"""Is the prediction right? Predicted against measured step time and peak memory.

    sudo python -m benchmarks.prediction                   # every configuration
    sudo python -m benchmarks.prediction --only GPT        # one model's
    sudo python -m benchmarks.prediction --uncorrected     # as at the first start of a model

Models of seven kinds, plans of five kinds, networks of three rates, 2 and 4 hosts (network
namespaces on this machine, one thread a rank). On the same hosts a model first trains in a
correcting run, by the planner's plan, whose steps teach the kept profile. Then its plans train in
turns, a few steps each, in the same processes: the machine is not always equally fast. Each
then trains in fresh processes for memory (the profiler that counts bytes slows steps down).
What is predicted is what the backend says at the first call, from machine and network that it
measured itself, once for all plans of a model. Saves a table as JSON and a scatter plot.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import osdp_compile
from benchmarks import in_turns
from benchmarks.hosts import Hosts
from benchmarks.in_turns import Run
from benchmarks.launch import environment
from benchmarks.processes import RanksError
from benchmarks.tasks import ALL_TASKS
from benchmarks.train import over_ranks
from osdp_compile import Decision, Plan
from passes.types.plan import shardable
from passes.types.units import format_bytes, format_seconds

WARMUP_STEPS, MEMORY_STEPS = 3, 2
#: Enough for traced steps that are alike.
CORRECTING_STEPS = 24
#: Turns of the plans of one model, and steps in each; the first of a turn is not counted.
TURNS, STEPS = 4, 4
#: How well the median step of one configuration repeats here from run to run.
REPEATABLE = 0.03
UNLIMITED = "10gbit"  # more than one core can send
MIXED = "mixed"
#: The planner's own plan, and that with activations that may move.
PLANNED, MOVES = "planned", "moves"
#: The decisions of a mixed plan, in turn. Half are gathered again: thirds would be as fast as one
#: of the other plans, and their order chance.
MIXTURE = (
    Decision.REPLICATE,
    Decision.SHARD_REGATHER,
    Decision.SHARD_KEEP,
    Decision.SHARD_REGATHER,
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """``plan``: one decision for all parameters, ``mixed``, ``planned`` or ``moves``."""

    task: str
    plan: str
    rate: str = "400mbit"
    hosts: int = 2

    def __str__(self) -> str:
        return f"{self.task}, {self.plan}, {self.hosts} x {self.rate}"


CONFIGURATIONS = [
    *(Configuration("GPT", plan) for plan in ("replicate", "shard_keep", "shard_regather", MIXED)),
    Configuration("GPT", "replicate", "100mbit"),
    Configuration("GPT", "shard_regather", "100mbit"),
    Configuration("GPT", "shard_keep", UNLIMITED),
    Configuration("GPT", MIXED, UNLIMITED),
    *(Configuration("wide MLP", plan) for plan in ("replicate", "shard_keep", "shard_regather")),
    Configuration("wide MLP", MIXED, "100mbit", 4),
    *(Configuration("conv net", plan) for plan in ("replicate", "shard_keep", "shard_regather")),
    *(Configuration("HF Llama", plan) for plan in ("replicate", "shard_keep", "shard_regather")),
    Configuration("HF Llama", MIXED, hosts=4),
    *(Configuration(task, MOVES) for task in ("wide layer", "many words", "DLRM")),
    *(Configuration(task, MOVES) for task in ("GPT", "HF Llama")),
    Configuration("wide GPT", MOVES, hosts=4),
]


@dataclasses.dataclass
class Outcome:
    """What was predicted of a configuration and what was measured."""

    configuration: Configuration
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def seconds_error(self) -> float:
        """Of the measured: 0.1 is predicted 10 % too slow."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def plan_for(model: nn.Module, kind: str, world_size: int) -> Plan:
    """One decision for all, or :data:`MIXED`: each matrix its own, and what follows it the same."""
    named = list(model.named_parameters())
    if kind != MIXED:
        return Plan.uniform(named, kind, world_size=world_size)
    plan = Plan.uniform(named, Decision.REPLICATE, world_size=world_size)
    decisions = itertools.cycle(MIXTURE)
    decision = next(decisions)
    rows = []
    for row in plan.parameters:
        if len(row.shape) > 1:  # by matrices: vectors between them would shift the turn
            decision = next(decisions)
        cut = shardable(row.shape, world_size)
        rows.append(dataclasses.replace(row, decision=decision) if cut else row)
    return plan.replace(parameters=tuple(rows))


def begin(configuration: Configuration, steps: int) -> Run:
    """Compile and train for so many steps."""
    task = ALL_TASKS[configuration.task]
    torch.manual_seed(0)
    model = task.model()
    options: dict[str, Any] = {"tensor_parallel": configuration.plan == MOVES}
    if configuration.plan not in (PLANNED, MOVES):
        options = {"plan": plan_for(model, configuration.plan, dist.get_world_size())}
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = (task.batch(generator) for _ in itertools.count())
    return in_turns.begin(model, batches, task.learning_rate, options, steps)


def measure_seconds(configurations: list[Configuration]) -> list[dict[str, float]]:
    """Step times of plans that take turns: on this rank and all others, the slowest's."""
    runs = [begin(configuration, WARMUP_STEPS) for configuration in configurations]
    return [
        {
            "measured_seconds": over_ranks(
                statistics.median(itertools.chain(*turns)), dist.ReduceOp.MAX
            ),
            "predicted_seconds": run.prediction.step_seconds,
        }
        for run, turns in zip(runs, in_turns.seconds_of(runs, TURNS, STEPS), strict=True)
    ]


def correct(configuration: Configuration) -> None:
    """Train so long that the kept profile learns."""
    begin(configuration, CORRECTING_STEPS)


def measure_bytes(configuration: Configuration) -> dict[str, int]:
    """Peak memory on this rank and all others, the largest."""
    with osdp_compile.PeakMemory() as memory:
        run = begin(configuration, MEMORY_STEPS)
    peak_bytes = int(over_ranks(memory.peak_bytes, dist.ReduceOp.MAX))
    return {"measured_bytes": peak_bytes, "predicted_bytes": run.prediction.peak_bytes}


def run(configurations: list[Configuration], console: Console, is_corrected: bool) -> list[Outcome]:
    """Every configuration, those on the same hosts together."""
    outcomes: dict[Configuration, Outcome] = {}
    places = dict.fromkeys((c.hosts, c.rate) for c in configurations)
    with tempfile.TemporaryDirectory(prefix="osdp-bench") as name:
        for count, rate in places:
            with Hosts(count, rate) as hosts:
                here = [c for c in configurations if (c.hosts, c.rate) == (count, rate)]
                for task, moves in dict.fromkeys((c.task, c.plan == MOVES) for c in here):
                    folder = Path(name) / f"{task} {moves} {count} {rate}".replace(" ", "-")
                    plans = [c for c in here if (c.task, c.plan == MOVES) == (task, moves)]
                    if is_corrected:
                        planned = dataclasses.replace(plans[0], plan=MOVES if moves else PLANNED)
                        _on(hosts, [planned], folder, "--correct")
                    times = _on(hosts, plans, folder)
                    for one, found in zip(plans, times, strict=True):
                        (peak,) = _on(hosts, [one], folder, "--memory")
                        outcomes[one] = Outcome(one, **found, **peak)
                        console.print(f"[dim]{one}: {_said(outcomes[one])}[/dim]")
    return [outcomes[configuration] for configuration in configurations]


def _on(hosts: Hosts, plans: list[Configuration], folder: Path, *options: str) -> list[Any]:
    out = folder / "result.json"
    folder.mkdir(exist_ok=True)
    arguments = ["--rank-of", json.dumps([dataclasses.asdict(plan) for plan in plans]), *options]
    command = [sys.executable, "-m", "benchmarks.prediction", *arguments, "--out", str(out)]
    hosts.run(command, environment(folder / "cache", folder / "profiles"))
    result: list[Any] = json.loads(out.read_text())
    return result


def _said(outcome: Outcome) -> str:
    return (
        f"step {format_seconds(outcome.predicted_seconds)} predicted, "
        f"{format_seconds(outcome.measured_seconds)} measured; "
        f"peak {format_bytes(outcome.predicted_bytes)}, {format_bytes(outcome.measured_bytes)}"
    )


def table(outcomes: list[Outcome]) -> Table:
    """For people."""
    made = Table(title=f"predicted against measured, torch {torch.__version__}")
    for head in ("model", "plan", "hosts"):
        made.add_column(head)
    for head in ("step", "measured", "error", "peak", "measured", "error"):
        made.add_column(head, justify="right")
    for outcome in outcomes:
        one = outcome.configuration
        made.add_row(
            one.task,
            one.plan,
            f"{one.hosts} x {one.rate}",
            format_seconds(outcome.predicted_seconds),
            format_seconds(outcome.measured_seconds),
            f"{100 * outcome.seconds_error:+.0f} %",
            format_bytes(outcome.predicted_bytes),
            format_bytes(outcome.measured_bytes),
            f"{100 * outcome.bytes_error:+.1f} %",
        )
    return made


def rank_correlation(outcomes: list[Outcome]) -> float:
    """Spearman's, of predicted and measured step time."""

    def ranks(values: list[float]) -> list[float]:
        ordered = sorted(values)
        return [float(ordered.index(value)) for value in values]

    if len(outcomes) < 2:
        return 1.0
    return statistics.correlation(
        ranks([o.predicted_seconds for o in outcomes]),
        ranks([o.measured_seconds for o in outcomes]),
    )


def in_order(outcomes: list[Outcome]) -> bool:
    """Whether any two plans whose steps measurably differ are predicted in that order."""
    ordered = sorted(outcomes, key=lambda o: o.measured_seconds)
    return all(
        one.predicted_seconds < other.predicted_seconds
        for index, one in enumerate(ordered)
        for other in ordered[index + 1 :]
        if other.measured_seconds > (1 + REPEATABLE) * one.measured_seconds
    )


def claims(outcomes: list[Outcome]) -> dict[str, bool]:
    """What the project promises of corrected predictions, and whether it holds here."""
    errors = sorted(abs(o.seconds_error) for o in outcomes)
    groups: dict[tuple[str, str, int], list[Outcome]] = {}
    for outcome in outcomes:
        one = outcome.configuration
        groups.setdefault((one.task, one.rate, one.hosts), []).append(outcome)
    plans = [group for group in groups.values() if len(group) > 2]
    return {
        "peak within 1.5 %": all(abs(o.bytes_error) <= 0.015 for o in outcomes),
        "peak never more than 0.5 % too low": all(o.bytes_error >= -0.005 for o in outcomes),
        "step time: median error at most 3 %": statistics.median(errors) <= 0.03,
        "step time: no error above 10 %": errors[-1] <= 0.10,
        "plans of one model in the right order (rank correlation at least 0.95)": all(
            rank_correlation(group) >= 0.95 for group in plans
        ),
        f"the same of those whose steps differ by more than {REPEATABLE:.0%}": all(
            in_order(group) for group in plans
        ),
    }


def save_picture(outcomes: list[Outcome], path: Path) -> None:
    """Predicted against measured, on logarithmic axes, a mark for each model."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = [
        ("step time, seconds", "predicted_seconds", "measured_seconds", 1.0, 0.10),
        ("peak memory, MiB", "predicted_bytes", "measured_bytes", float(1 << 20), 0.05),
    ]
    for axes, (title, predicted, measured, unit, band) in zip(
        figure.subplots(1, 2), panels, strict=True
    ):
        for task, mark in zip(ALL_TASKS, "osD^vP*X", strict=True):
            mine = [o for o in outcomes if o.configuration.task == task]
            xs = [getattr(o, measured) / unit for o in mine]
            axes.scatter(xs, [getattr(o, predicted) / unit for o in mine], marker=mark, label=task)
        every = [getattr(o, measured) / unit for o in outcomes]
        ends = [0.8 * min(every), 1.25 * max(every)]
        axes.plot(ends, ends, color="gray", linewidth=1)
        low, high = [end * (1 - band) for end in ends], [end * (1 + band) for end in ends]
        axes.fill_between(ends, low, high, color="gray", alpha=0.2, label=f"within {band:.0%}")
        axes.set(xscale="log", yscale="log", title=title, xlabel="measured", ylabel="predicted")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(ALL_TASKS), help="these models only")
    parser.add_argument("--uncorrected", action="store_true", help="without a correcting run")
    parser.add_argument("--out", type=Path, default=Path("prediction.json"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    for phase in ("--memory", "--correct"):
        parser.add_argument(phase, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        wanted = [Configuration(**one) for one in json.loads(given.rank_of)]
        one_by_one = measure_bytes if given.memory else correct if given.correct else None
        _rank(wanted, one_by_one, given.out)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    wanted = [c for c in CONFIGURATIONS if not given.only or c.task in given.only]
    try:
        outcomes = run(wanted, console, not given.uncorrected)
    except RanksError as error:
        sys.exit(str(error))
    console.print(table(outcomes))
    held = claims(outcomes)
    for claim, holds in held.items():
        console.print(("[green]yes[/green] " if holds else "[red]no[/red]  ") + claim)
    record = {"outcomes": [dataclasses.asdict(o) for o in outcomes], "claims": held}
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    save_picture(outcomes, given.out.with_suffix(".png"))
    console.print(f"[dim]saved {given.out} and {given.out.with_suffix('.png')}[/dim]")


def _rank(
    configurations: list[Configuration],
    one_by_one: Callable[[Configuration], Any] | None,
    out: Path,
) -> None:
    torch.set_num_threads(1)
    logging.getLogger("osdp_compile").setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    found: list[Any]
    if one_by_one is None:
        found = list(measure_seconds(configurations))
    else:
        found = [one_by_one(configuration) for configuration in configurations]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
