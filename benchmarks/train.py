"""One rank of a measurement: train a model one way, write what was measured.

Started by the other benchmarks on every rank, with torch.distributed's variables set.
``--phase``: what is measured, for one disturbs the other:

* ``time``: seconds of steps, after warm-up;
* ``memory``: the peak of tensor bytes since before the model was built, over three steps;
* ``first``: seconds of the first forward and backward;
* ``start``: seconds from the start of the process to the end of the first optimizer step;
* ``least``: the least memory limit that osdp can hold, or what it predicts if none is given.

Rank 0 writes a JSON file; of times and peaks, the highest over ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import osdp_compile
from benchmarks.gpu.share import join_ranks
from benchmarks.peers import WAYS
from benchmarks.tasks import ALL_TASKS, words
from examples.gpt import GPT, GPTConfig
from osdp_compile.calibration.timed_collectives import synchronize

MEMORY_STEPS = 3
PHASES = ("time", "memory", "first", "start", "least")


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained: a GPT of this size, or one of ``benchmarks.tasks`` by its name.

    ``batch``: sequences of ``context`` tokens a rank and step. ``device``: ``cpu`` or ``cuda``.
    """

    task: str = ""
    layers: int = 4
    width: int = 512
    batch: int = 4
    context: int = 128
    warmup_steps: int = 3
    timed_steps: int = 8
    device: str = "cpu"

    def model(self) -> nn.Module:
        """The same parameters on every rank."""
        torch.manual_seed(0)
        if self.task:
            return ALL_TASKS[self.task].model().to(self.device)
        config = GPTConfig(layers=self.layers, width=self.width, context=self.context)
        return GPT(config).to(self.device)

    @property
    def learning_rate(self) -> float:
        return ALL_TASKS[self.task].learning_rate if self.task else 1e-3

    def inputs(self, step: int) -> tuple[Any, ...]:
        """This rank's batch, the same for every way; the model's loss comes of it."""
        return self.inputs_of(1000 * step + dist.get_rank())

    def inputs_of(self, seed: int) -> tuple[Any, ...]:
        """Some batch."""
        make = ALL_TASKS[self.task].batch if self.task else words(1024, self.batch, self.context)
        made = make(torch.Generator().manual_seed(seed))
        return tuple(one.to(self.device) for one in made)


def train(work: Work, way: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train for some steps: losses and seconds of each, and what osdp decided."""
    model = work.model()
    called = WAYS[way](model, options)
    optimizer = torch.optim.AdamW(called.parameters(), lr=work.learning_rate)
    device = torch.device(work.device)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(steps):
        inputs = work.inputs(step)
        synchronize(device)
        begin = time.perf_counter()
        loss = called(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    result: dict[str, Any] = {"losses": losses, "seconds": seconds}
    plan = osdp_compile.plan_of(model)
    if plan is not None:
        decisions = [str(p.decision.name) for p in plan.parameters]
        result["decisions"] = {kind: decisions.count(kind) for kind in sorted(set(decisions))}
        if plan.prediction is not None:
            result["predicted"] = {
                "step_seconds": plan.prediction.step_seconds,
                "peak_bytes": plan.prediction.peak_bytes,
            }
    return result


def first_call_seconds(work: Work, way: str, options: dict[str, Any]) -> float:
    """Seconds of the first forward and backward, everything that is compiled included."""
    called = WAYS[way](work.model(), options)
    inputs = work.inputs(0)
    dist.barrier()
    begin = time.perf_counter()
    called(*inputs).backward()
    return time.perf_counter() - begin


def start_seconds(work: Work, way: str, options: dict[str, Any], started: float) -> float:
    """Seconds from ``started`` to the end of the first optimizer step."""
    train(work, way, options, steps=1)
    return time.time() - started


def least_bytes(work: Work, options: dict[str, Any]) -> int:
    """The least limit that is feasible if the given one is not; else the predicted peak."""
    model = work.model()
    called = WAYS["osdp"](model, options)
    inputs = work.inputs(0)
    try:
        called(*inputs)
    except osdp_compile.InfeasibleLimit as error:
        return error.least_bytes
    plan = osdp_compile.plan_of(model)
    assert plan is not None and plan.prediction is not None
    return plan.prediction.peak_bytes


def over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    """A figure reduced over all ranks: the slowest's, the largest."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    return float(tensor)


def measure(
    work: Work, way: str, options: dict[str, Any], phase: str, started: float
) -> dict[str, Any]:
    """One phase on this rank and all others; the figures of the slowest and the largest."""
    if phase == "start":
        seconds = start_seconds(work, way, options, started)
        cpu_seconds = sum(os.times()[:4])  # with the compilers that have ended
        return {
            "start_seconds": over_ranks(seconds, dist.ReduceOp.MAX),
            "cpu_seconds": over_ranks(cpu_seconds, dist.ReduceOp.MAX),
        }
    if phase == "first":
        seconds = first_call_seconds(work, way, options)
        return {"first_call_seconds": over_ranks(seconds, dist.ReduceOp.MAX)}
    if phase == "least":
        return {"least_bytes": least_bytes(work, options)}
    steps = MEMORY_STEPS if phase == "memory" else work.warmup_steps + work.timed_steps
    memory = osdp_compile.PeakMemory(work.device) if phase == "memory" else None
    with memory or contextlib.nullcontext():
        result = train(work, way, options, steps)
    total = torch.tensor(result["losses"], dtype=torch.float64)
    dist.all_reduce(total)
    result["losses"] = (total / dist.get_world_size()).tolist()
    if memory is not None:
        result["peak_bytes"] = int(over_ranks(memory.peak_bytes, dist.ReduceOp.MAX))
        del result["seconds"]
    else:
        timed = result["seconds"][work.warmup_steps :]
        result["step_seconds"] = over_ranks(statistics.median(timed), dist.ReduceOp.MAX)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--way", choices=list(WAYS), required=True)
    parser.add_argument("--phase", choices=PHASES, required=True)
    parser.add_argument("--work", required=True, help="a Work as JSON")
    parser.add_argument("--options", default="{}", help="options of the osdp backend as JSON")
    parser.add_argument("--started", type=float, default=0.0, help="time.time() of the start")
    parser.add_argument("--backend", default="gloo", help="of the process group")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("osdp_compile").setLevel(logging.WARNING)
    work = Work(**json.loads(given.work))
    join_ranks(work.device, given.backend)
    result = measure(work, given.way, json.loads(given.options), given.phase, given.started)
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
