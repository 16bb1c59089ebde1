"""Whether more memory ever gives a slower predicted step: five models at fifty limits each.

    python -m benchmarks.more_memory
    python -m benchmarks.more_memory --search quick

The limits are evenly spaced from the least that is feasible to what is taken without one. A
thorough search is never slower by how it is made, as is a frontier (``osdp plan --frontier``,
``osdp sweep``), which lets a plan count wherever it fits. A quick one may be slower by a percent.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import time
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks.claims import conclude
from benchmarks.tasks import TASKS, words
from examples.gpt import GPT, GPTConfig
from osdp_compile.options import Search
from osdp_compile.planning.frontier import each_by_itself
from osdp_compile.planning.traced_step import TracedStep, predicted, trace
from passes.types.hardware_presets import PRESETS
from passes.types.units import format_bytes, format_seconds

#: The same to five digits is the same.
_EQUAL = 1 + 1e-5
#: By how much a quick search may find a slower step with more memory.
_QUICK = 0.01


def _deep() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = GPT(GPTConfig(layers=24, width=256, context=128))
    return model, words(1024, 2, 128)(torch.Generator())


def _task(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return TASKS[name].model(), TASKS[name].batch(torch.Generator())


def _step(name: str) -> TracedStep:
    return trace(*(_deep() if name == "GPT of 24 layers" else _task(name)))


MODELS = (*TASKS, "GPT of 24 layers")


@dataclasses.dataclass(frozen=True)
class Found:
    """One model: its limits in bytes, the predicted steps, and what planning one took (mean)."""

    name: str
    limits: tuple[int, ...]
    step_seconds: tuple[float, ...]
    plan_seconds: float

    @property
    def regressions(self) -> list[float]:
        """By how much each limit's step is slower than the best of the limits below it."""
        return [
            max(0.0, own / min(self.step_seconds[:index]) - 1)
            for index, own in enumerate(self.step_seconds)
            if index
        ]


def planned(given: tuple[str, int, str, int, Search]) -> Found:
    """Plan a model at so many limits; the rungs of a thorough search once for all."""
    name, points, hardware_name, world, search = given
    torch.set_num_threads(1)
    step = _step(name)
    began = time.perf_counter()
    found = each_by_itself(
        step, {"ranks": world}, PRESETS[hardware_name], points=points, search=search
    )
    each_seconds = (time.perf_counter() - began) / points
    steps = tuple(predicted(plan).step_seconds for _, plan in found)
    return Found(name, tuple(limit for limit, _ in found), steps, each_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--hardware", default="cpu-gloo", help="a preset")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--search", choices=get_args(Search), default="thorough")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("more_memory.json"))
    given = parser.parse_args()
    console = Console()
    work = [
        (name, given.points, given.hardware, given.world_size, given.search)
        for name in given.models
    ]
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        made = pool.imap(planned, work)
        found = list(track(made, "planning", len(work), console=console))
    table = Table(title="the step under more and more memory", title_justify="left")
    for head in ("model", "limits", "steps", "slower in", "at most by", "planning took"):
        table.add_column(head, justify="left" if head == "model" else "right")
    for one in found:
        slower = [share for share in one.regressions if share > _EQUAL - 1]
        table.add_row(
            one.name,
            f"{format_bytes(one.limits[0])} to {format_bytes(one.limits[-1])}",
            f"{format_seconds(one.step_seconds[0])} to {format_seconds(one.step_seconds[-1])}",
            f"{len(slower)} of {len(one.limits)}",
            f"{max(slower, default=0):.1%}",
            format_seconds(one.plan_seconds),
        )
    console.print(table)
    most = _EQUAL - 1 if given.search == "thorough" else _QUICK
    holds = all(share <= most for one in found for share in one.regressions)
    record = {"models": [dataclasses.asdict(one) for one in found]}
    claims = {f"more memory never gives a predicted step that is {most:.1%} slower": holds}
    conclude(console, claims, record, given.out)


if __name__ == "__main__":
    main()
