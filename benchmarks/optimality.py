"""How near the planner's plan is to the best of all there are, priced by the same simulator.

    python -m benchmarks.optimality                 # 300 instances, about half an hour
    python -m benchmarks.optimality --instances 20

An instance is a random chain of layers with three to six parameters, a random network, a number
of ranks, and a memory limit between the least that is feasible and what is taken without one.
Every plan that can be written down for it, at the bucket sizes that the planner started from and
ended at, is lowered and simulated; the fastest that fits is the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import random
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from osdp_compile.traced_step import TracedStep, trace
from passes.bucket import bucket_bytes_for
from passes.context import Context
from passes.decisions import FLAT_DECISIONS, Decision, ParameterPlan, Plan, shardable
from passes.hardware import Hardware, LinkRate
from passes.plan import complete

#: What the project promises: never so much worse, and as good in so many of all.
NEVER_WORSE, MOSTLY_EQUAL = 1.01, 0.95
#: Equal, but for rounding.
_EQUAL = 1 + 1e-9
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclasses.dataclass(frozen=True)
class Found:
    """One instance: seconds of the planner's step and of the best, and how many plans there are."""

    seed: int
    parameters: int
    plans: int
    seconds: float
    best_seconds: float
    plan_seconds: float

    @property
    def ratio(self) -> float:
        """Below one where the planner's bucket sizes are better than those enumerated."""
        return self.seconds / self.best_seconds


def instance(seed: int) -> Found:
    """Make one, plan it, and look at everything else."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    draw = random.Random(seed)
    step = _step(draw)
    ranks, hardware = {"ranks": draw.choice([2, 4, 8])}, _hardware(draw)
    limit = _limit(step, ranks, hardware, draw.random())
    began = time.perf_counter()
    plan = step.plan(ranks, hardware, limit)
    plan_seconds = time.perf_counter() - began
    ctx = step.context(ranks, hardware, limit)
    every = _every_plan(step, ctx)
    sizes = dict.fromkeys((bucket_bytes_for(ctx), plan.bucket_bytes))
    assert plan.prediction is not None
    best = plan.prediction.step_seconds
    enumerated = []
    for one, size in itertools.product(every, sizes):
        said = complete(one.replace(bucket_bytes=size), step.captured, ctx, step.passes).prediction
        assert said is not None
        if said.peak_bytes <= limit:
            enumerated.append(said.step_seconds)
    return Found(
        seed,
        len(step.parameters),
        len(every),
        plan.prediction.step_seconds,
        min(enumerated, default=best),
        plan_seconds,
    )


def _step(draw: random.Random) -> TracedStep:
    """A chain of layers, some of which read what comes before the last one."""

    class Chain(nn.Module):
        def __init__(self, layers: list[nn.Linear], skips: list[bool]) -> None:
            super().__init__()
            self.layers, self.skips = nn.ModuleList(layers), skips

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, skip in zip(self.layers, self.skips, strict=True):
                after = layer(x).relu()
                x = torch.cat([x, after], dim=1) if skip else after
            return x.square().mean()

    rows = draw.choice([8, 32, 128, 512])
    wanted = draw.choice([3, 4, 4, 5, 5, 6])
    width, count = draw.choice([32, 64, 128]), 0
    layers, skips = [], []
    with torch.device("meta"):
        x = torch.empty(rows, width)
        while count < wanted:
            outputs = draw.choice([16, 30, 64, 128, 256, 512])
            bias = draw.random() < 0.3 and count + 2 <= wanted
            layers.append(nn.Linear(width, outputs, bias=bias))
            skips.append(draw.random() < 0.3)
            width = width + outputs if skips[-1] else outputs
            count += 1 + bias
        return trace(Chain(layers, skips), (x,), optimizer=draw.choice(["adamw", "sgd"]))


def _hardware(draw: random.Random) -> Hardware:
    """From a network that is nearly free to one that takes ten times as long as the computing."""
    rates = {}
    byte_seconds = 10 ** draw.uniform(-10, -7.5)
    for kind in _KINDS:
        rates[kind] = LinkRate(
            latency_seconds=10 ** draw.uniform(-6, -4),
            seconds_per_byte=byte_seconds * draw.uniform(0.8, 1.25),
            busy_seconds_per_byte=draw.choice([0.0, 0.15]) * byte_seconds,
        )
    return Hardware("random", {"default": 5e10}, 1e10, 2e-6, rates)


def _limit(step: TracedStep, ranks: dict[str, int], hardware: Hardware, share: float) -> int:
    """So far on the way from the least limit to what is taken without one."""
    free = step.plan(ranks, hardware).prediction
    assert free is not None
    least = step.least_bytes(ranks, hardware)
    return round(least + share * (free.peak_bytes - least))


def _every_plan(step: TracedStep, ctx: Context) -> list[Plan]:
    options = [
        list(FLAT_DECISIONS) if shardable(one.shape, ctx.world_size) else [Decision.REPLICATE]
        for one in step.parameters
    ]
    return [
        Plan(
            tuple(
                ParameterPlan(one.name, one.shape, one.dtype, decision)
                for one, decision in zip(step.parameters, decisions, strict=True)
            ),
            world_size=ctx.world_size,
        )
        for decisions in itertools.product(*options)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("optimality.json"))
    given = parser.parse_args()
    console = Console()
    seeds = range(given.first, given.first + given.instances)
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        made = pool.imap(instance, seeds)
        found = list(track(made, "looking at every plan", len(seeds), console=console))
    ratios = [one.ratio for one in found]
    equal = sum(ratio <= _EQUAL for ratio in ratios) / len(found)
    console.print(
        f"{len(found)} instances, {sum(one.plans for one in found)} plans; the planner took "
        f"{statistics.median(one.plan_seconds for one in found):.2f} s (median)"
    )
    for one in sorted(found, key=lambda one: -one.ratio)[:5]:
        console.print(f"seed {one.seed}, {one.parameters} parameters: {one.ratio:.4f}")
    for claim, holds in {
        f"never more than {NEVER_WORSE - 1:.0%} slower than the best": max(ratios) <= NEVER_WORSE,
        f"as fast as the best in {MOSTLY_EQUAL:.0%} ({equal:.1%})": equal >= MOSTLY_EQUAL,
    }.items():
        console.print(("[green]yes[/green] " if holds else "[red]no[/red]  ") + claim)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
