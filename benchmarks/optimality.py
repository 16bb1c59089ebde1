"""How near the planner's plan is to the best of all there are, priced by the same simulator.

    python -m benchmarks.optimality                 # 330 instances: half an hour on two cores
    python -m benchmarks.optimality --instances 20

An instance is a random chain of layers, a random network, a number of ranks on a mesh of one
or two dimensions, and a memory limit between the least that is feasible and what is taken without
one (``benchmarks/instances.py``). Every plan that can be written down for it, at the bucket sizes
that the planner started from and ended at, is lowered and simulated; the fastest that fits is the
best.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.claims import conclude
from benchmarks.instances import KINDS, Instance, instance
from osdp_compile.errors import InfeasibleLimit
from osdp_compile.planning.traced_step import predicted
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.constants import CONSTANTS
from passes.plan.planner import complete
from passes.pricing.predict import predict
from passes.types.plan import ParameterPlan, Plan
from passes.types.units import format_bytes

#: What the project promises: never so much worse, and as good in so many of all.
NEVER_WORSE, MOSTLY_EQUAL = 1.005, 0.99
#: Equal, but for what alike decisions of alike parameters may cost.
_EQUAL = 1 + CONSTANTS.alike


@dataclasses.dataclass(frozen=True)
class Found:
    """One instance: seconds of the planner's step and of the best, and how many plans there are.

    ``differs``: what the best plan has that the planner's has not; "" where that is the best.
    """

    seed: int
    kind: str
    parameters: int
    plans: int
    seconds: float
    best_seconds: float
    plan_seconds: float
    looking_seconds: float
    differs: str = ""

    @property
    def ratio(self) -> float:
        """Below one where the planner's bucket sizes are better than those enumerated.

        Infinite where the planner refused a limit that a plan fits under; 1 where no plan was
        found that does.
        """
        if math.isinf(self.best_seconds):
            return 1.0
        return self.seconds / self.best_seconds


def looked_at(seed: int) -> Found:
    """Make an instance, plan it, and look at everything else."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    one = instance(seed)
    began = time.perf_counter()
    plan: Plan | None = None
    with contextlib.suppress(InfeasibleLimit):  # there is a plan, or there were no such limit
        plan = one.step.plan(one.ranks, one.hardware, one.limit_bytes)
    planned = time.perf_counter()
    every = one.plans()
    best = _best(one, plan, every)
    seconds = math.inf if plan is None else predicted(plan).step_seconds
    best_seconds = math.inf if best is None else predicted(best).step_seconds
    differs = ""
    if best is not None and seconds > _EQUAL * best_seconds:
        differs = _difference(plan, best)
    return Found(
        seed,
        one.kind,
        len(one.step.parameters),
        len(every),
        seconds,
        best_seconds,
        planned - began,
        time.perf_counter() - planned,
        differs,
    )


def _best(one: Instance, planned: Plan | None, every: Sequence[Plan]) -> Plan | None:
    """The fastest that fits of all plans but the planner's; its own if there is no other.

    ``planned``: None if it refused the limit.
    """
    step, ctx = one.step, one.context
    deciding = ctx.replace(deciding=True)
    best, best_seconds = planned, math.inf
    sizes = [bucket_bytes_for(ctx)]
    if planned is not None and planned.bucket_bytes not in sizes:
        sizes.append(planned.bucket_bytes)
    gc.collect()
    gc.freeze()  # a graph is a cycle: else all of torch's objects are looked through for each
    for plan, size in itertools.product(every, sizes):
        plan = plan.replace(bucket_bytes=size)
        said = predict(step.captured, plan, deciding, step.passes).prediction
        if said.step_seconds >= best_seconds:
            continue
        found = complete(plan, step.captured, ctx, step.passes)
        if predicted(found).peak_bytes <= one.limit_bytes:
            best, best_seconds = found, predicted(found).step_seconds
    gc.unfreeze()
    return best


def _difference(plan: Plan | None, best: Plan) -> str:
    """In words, what the best plan has in place of what the planner's has."""
    if plan is None:
        decisions = (f"{row.name} {row.decision.name}" for row in best.parameters)
        return "what the planner refused: " + ", ".join(decisions)
    words = [
        f"{row.name} {row.decision.name} -> {best.decision(row.name).name}"
        for row in plan.parameters
        if row.decision != best.decision(row.name)
    ]
    if plan.bucket_bytes != best.bucket_bytes:
        sizes = (format_bytes(one.bucket_bytes) for one in (plan, best))
        words.append("buckets " + " -> ".join(sizes))
    words += [
        f"{row.name} {_slices(row)} -> {_slices(best[row.name])}"
        for row in plan.parameters
        if _slices(row) != _slices(best[row.name])
    ]
    if (plan.recompute, plan.also_save) != (best.recompute, best.also_save):
        sizes = (
            f"{len(one.recompute)} tensors of {format_bytes(predicted(one).recomputed_bytes)}"
            for one in (plan, best)
        )
        words.append("recomputes " + " -> ".join(sizes))
    return ", ".join(words) or "the order of collectives alone"


def _slices(row: ParameterPlan) -> str:
    kept = f", {row.kept_slices} kept" if row.kept_slices else ""
    return f"in {row.slices}{kept}"


def table(found: Sequence[Found]) -> Table:
    """For people: a row for each kind."""
    made = Table()
    made.add_column("kind")
    heads = ("instances", "parameters", "plans", "equal", "worst", "planning s", "looking s")
    for head in heads:
        made.add_column(head, justify="right")
    for kind in (*KINDS, "all"):
        own = [one for one in found if kind in (one.kind, "all")]
        if not own:
            continue
        sizes = [one.parameters for one in own]
        made.add_row(
            kind,
            str(len(own)),
            f"{min(sizes)} to {max(sizes)}",
            str(sum(one.plans for one in own)),
            f"{_equal(own):.1%}",
            f"{max(one.ratio for one in own):.4f}",
            f"{statistics.median(one.plan_seconds for one in own):.2f}",
            f"{statistics.median(one.looking_seconds for one in own):.1f}",
        )
    return made


def _equal(found: Sequence[Found]) -> float:
    return sum(one.ratio <= _EQUAL for one in found) / len(found)


def claims(found: Sequence[Found]) -> dict[str, bool]:
    """What the project promises of the planner, and whether it holds here."""
    worst, equal = max(one.ratio for one in found), _equal(found)
    return {
        f"never more than {NEVER_WORSE - 1:.1%} slower than the best": worst <= NEVER_WORSE,
        f"as fast as the best in {MOSTLY_EQUAL:.0%} ({equal:.1%})": equal >= MOSTLY_EQUAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=330)
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="these instead")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("optimality.json"))
    given = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    seeds = given.seeds or range(given.first, given.first + given.instances)
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        made = pool.imap(looked_at, seeds)
        found = []
        for one in track(made, "looking at every plan", len(seeds), console=console):
            found.append(one)
            if one.differs:
                console.print(
                    f"seed {one.seed}, {one.kind}, {one.parameters} parameters: {one.ratio:.4f}; "
                    f"the best has {one.differs}",
                    markup=False,
                )
            if not console.is_terminal and len(found) % 10 == 0:
                console.print(f"{len(found)} of {len(seeds)} instances")
    console.print(table(found))
    record = {"instances": [dataclasses.asdict(one) for one in found]}
    conclude(console, claims(found), record, given.out)


if __name__ == "__main__":
    main()
