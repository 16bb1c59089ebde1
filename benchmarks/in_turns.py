"""Plans that train in turns in the same processes: the machine is not always equally fast.

As a command it is one rank of such a measurement, started on every rank with
torch.distributed's variables set; rank 0 writes the seconds of every turn of every plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import osdp_compile
from benchmarks.hosts import Hosts
from benchmarks.launch import environment
from benchmarks.train import Work, over_ranks
from osdp_compile import Hardware, Plan, Prediction

_WARMUP_STEPS = 3
#: In which compiling many plans must be done.
_TIMEOUT_SECONDS = 7200.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A plan in training on this rank. ``step``: takes one and says its seconds."""

    step: Callable[[], float]
    prediction: Prediction


def begin(
    model: nn.Module,
    batches: Iterator[tuple[Any, ...]],
    learning_rate: float,
    options: dict[str, Any],
    steps: int,
) -> Run:
    """Compile a model, its ``options`` the backend's, and train for so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    # Without this the eighth model of one class would be the last that Dynamo compiles.
    compiled = torch.compile(  # type: ignore[call-overload]
        model, backend="osdp", options=options, isolate_recompiles=True
    )

    def step() -> float:
        batch = next(batches)
        started = time.perf_counter()
        compiled(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    for _ in range(steps):
        step()
    in_force = osdp_compile.plan_of(model)
    assert in_force is not None and in_force.prediction is not None
    return Run(step, in_force.prediction)


def seconds_of(runs: Sequence[Run], turns: int, steps: int) -> list[list[list[float]]]:
    """Seconds of steps by plan and turn, on this rank. The first step of a turn is not counted.

    Every round is in another order, the same on all ranks: who comes after whom is chance.
    """
    seconds: list[list[list[float]]] = [[] for _ in runs]
    draw = random.Random(0)
    gc.collect()
    gc.freeze()  # looking through what was compiled takes longer with every plan
    try:
        for _ in range(turns):
            for index in draw.sample(range(len(runs)), len(runs)):
                seconds[index].append([runs[index].step() for _ in range(steps)][1:])
    finally:
        gc.unfreeze()
    return seconds


def measure(
    hosts: Hosts,
    work: Work,
    plans: Sequence[Plan],
    hardware: Hardware,
    turns: int,
    steps: int,
    cache: Path,
) -> list[list[float]]:
    """Train plans in turns on all hosts, in fresh processes; ``cache``: of compiled code.

    ``hardware``: what the plans were made for.

    Returns, by plan, the median step of each turn, of the slowest rank.

    Raises:
        RanksError: if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="osdp-bench") as name:
        folder = Path(name)
        hardware.save(folder / "hardware.json")
        for number, plan in enumerate(plans):
            plan.save(folder / f"plan{number}.json")
        given = {"work": dataclasses.asdict(work), "plans": len(plans), "turns": turns}
        (folder / "given.json").write_text(json.dumps({**given, "steps": steps}))
        command = [sys.executable, "-m", "benchmarks.in_turns", str(folder)]
        hosts.run(command, environment(cache), _TIMEOUT_SECONDS)
        found: list[list[float]] = json.loads((folder / "found.json").read_text())
        return found


def _rank(folder: Path) -> None:
    given = json.loads((folder / "given.json").read_text())
    work = Work(**given["work"])
    hardware = Hardware.load(folder / "hardware.json")
    runs = []
    for number in range(given["plans"]):
        options = {"plan": Plan.load(folder / f"plan{number}.json"), "hardware": hardware}
        batches = map(work.inputs, itertools.count())
        runs.append(begin(work.model(), batches, work.learning_rate, options, _WARMUP_STEPS))
    found = [
        [over_ranks(statistics.median(turn), dist.ReduceOp.MAX) for turn in turns]
        for turns in seconds_of(runs, given["turns"], given["steps"])
    ]
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="with what is to be measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("osdp_compile").setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    _rank(given.folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
