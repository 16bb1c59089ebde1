"""Is the prediction right on a GPU? A Llama trains alone, under the plans of eight ranks.

The other ranks are a fake process group's, and the profile prices collectives at nothing. So the
prediction is the compute time of one rank of eight, and its peak. The fake group copies this rank's
shard once for each rank: kernels of the GPU and their launches, which the step holds and the time
of its other kernels does not.

``prepare`` measures the GPU and the step's operators and makes six plans: all replicated, all
sharded and kept gathered, all sharded and gathered again, the planner's under a limit between
the last two, and two in which activations move. ``train`` measures one of them in a process of its
own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import osdp_compile
from benchmarks.gpu.deadline import Deadline, TimeUpError
from benchmarks.gpu.llama import Llama, LlamaConfig, shared_dims
from osdp_compile import Decision, Hardware, Plan
from osdp_compile.calibration.calibrate import calibrate
from osdp_compile.calibration.operator_times import with_kernel_seconds
from osdp_compile.calibration.optimizer_times import with_update_seconds
from osdp_compile.calibration.timed_collectives import synchronize
from osdp_compile.calibration.workspaces import measured_workspaces
from osdp_compile.planning.traced_step import predicted, trace
from osdp_compile.trace import fake_world
from passes.plan.constants import CONSTANTS
from passes.types.hardware import LinkRate

RANKS = 8
UNIFORM = ("replicate", "shard_keep", "shard_regather")
#: Plans in which activations move. Kept: the backward reads the gathered tokens, and those of MLPs
#: travel in two chunks.
MOVING = {"tensor_parallel": False, "tensor_parallel_kept": True}
PLANS = (*UNIFORM, "limit", *MOVING)
#: Of a dry run.
FEW_PLANS = ("limit", "tensor_parallel")
_WARMUP_STEPS, _STEPS = 3, 8
#: Memory of one training. As many compile at once as the GPU has room for.
_ROOM_BYTES = 24 << 30


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and its batch: each rank has ``rows`` sequences of ``length`` tokens."""

    config: LlamaConfig = dataclasses.field(default_factory=LlamaConfig)
    rows: int = 2
    length: int = 2048
    dtype: torch.dtype = torch.bfloat16

    def model(self, device: torch.device) -> nn.Module:
        with device:
            return Llama(self.config).to(self.dtype)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, self.config.vocab, (self.rows, self.length + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


FULL = Size()
SMALL = Size(LlamaConfig(512, 1, 128, 16, 8, 256), 2, 64, torch.float32)


def prepare(size: Size, device: torch.device, folder: Path) -> None:
    """Measure, and save the profile and the plans."""
    with fake_world(RANKS):
        hardware = calibrate(None, device, seconds=4.0).hardware
        hardware = with_update_seconds(hardware, dist.group.WORLD, device, 1 << 30)
        free = LinkRate(latency_seconds=0.0, seconds_per_byte=0.0)
        kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        hardware = dataclasses.replace(hardware, collectives=dict.fromkeys(kinds, free))
        step = trace(size.model(device), size.batch(device))
        context = step.context({"": RANKS}, hardware, None)
        hardware = with_kernel_seconds(step.captured, context, device, 10.0, 8 << 30)
        workspaces = measured_workspaces(step.captured, device, 8 << 30)
        step = dataclasses.replace(step, workspaces=workspaces)
    hardware.save(folder / "hardware.json")
    ranks = {"": RANKS}
    peaks = {}
    for name in UNIFORM:
        plan = step.uniform(Decision.named(name), ranks, hardware)
        plan.save(folder / f"{name}.json")
        peaks[name] = predicted(plan).peak_bytes
    least_bytes = step.least_bytes(ranks, hardware)
    limit_bytes = (peaks["shard_regather"] + least_bytes) // 2
    step.plan(ranks, hardware, limit_bytes).save(folder / "limit.json")
    attention, mlps = shared_dims(size.config)
    for name, kept in MOVING.items():
        moving = plan.tensor_parallel(attention, keep_tokens=kept)
        moving = moving.tensor_parallel(mlps, keep_tokens=kept, chunks=2 if kept else 1)
        moving.save(folder / f"{name}.json")


def train(size: Size, device: torch.device, folder: Path, name: str) -> dict[str, Any]:
    """Peak memory and step time of one plan, predicted and measured."""
    plan = Plan.load(folder / f"{name}.json")
    hardware = Hardware.load(folder / "hardware.json")
    with fake_world(RANKS), osdp_compile.PeakMemory(device) as memory:
        torch.manual_seed(0)
        model = size.model(device)
        optimizer = torch.optim.AdamW(model.parameters())
        options: dict[str, Any] = {"plan": plan, "hardware": hardware}
        compiled = torch.compile(model, backend="osdp", options=options)
        batch = size.batch(device)

        def seconds() -> float:
            synchronize(device)
            begin = time.perf_counter()
            compiled(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            return time.perf_counter() - begin

        begin = time.perf_counter()
        compiled(*batch)  # compiles
        compile_seconds = time.perf_counter() - begin
        with _alone(folder):
            times = [seconds() for _ in range(_WARMUP_STEPS + _STEPS)]
            kernels_seconds = None
            if device.type == "cuda":
                kernels_seconds = _kernels_seconds(lambda: compiled(*batch).backward())
        requested_bytes = 0
        if device.type == "cuda":
            requested_bytes = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
        graphs = osdp_compile.report(model).timeline.phases
    prediction = predicted(osdp_compile.plan_of(model) or plan)
    return {
        "plan": name,
        "predicted_bytes": prediction.peak_bytes,
        "measured_bytes": memory.peak_bytes,
        "requested_bytes": requested_bytes,
        "limit_bytes": plan.memory_limit_bytes,
        "predicted_seconds": prediction.step_seconds,
        "measured_seconds": statistics.median(times[_WARMUP_STEPS:]),
        "predicted_kernels_seconds": sum(
            phase.compute_seconds for phase in graphs if phase.phase != "optimizer"
        ),
        "kernels_seconds": kernels_seconds,
        "compile_seconds": compile_seconds,
    }


def _kernels_seconds(run: Callable[[], object]) -> float:
    """Seconds of a GPU's kernels. Kernels that collectives start do not count."""
    with torch.profiler.profile() as profile:
        run()
        torch.cuda.synchronize()
    rows = profile.key_averages()
    all_us = sum(
        row.self_device_time_total
        for row in rows
        if row.device_type.name == "CUDA" and not row.is_user_annotation
    )
    sent_us = sum(row.device_time_total for row in rows if row.key.startswith("_c10d_functional::"))
    return float(all_us - sent_us) / 1e6


@contextlib.contextmanager
def _few_evaluations() -> Iterator[None]:
    """A context in which the planner evaluates few plans, for a dry run."""
    few = dataclasses.replace(CONSTANTS, most_plans=20)
    with mock.patch("passes.plan.search.CONSTANTS", few):
        yield


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context in which no other plan of the folder trains."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure(
    device: str, dry: bool, deadline: Deadline, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All plans, each in fresh processes; several compile at once if the GPU has room for them.

    ``dry``: a tiny model, and some of the plans. Second: why there are no figures of a plan, if it
    was not done at the deadline.

    Raises:
        TimeUpError: if the plans were not made at the deadline.
        RuntimeError: if a process fails, with the end of its output.
    """
    common = ["--device", device, "--folder", str(folder), *(["--dry"] if dry else [])]
    _run(["prepare", *common], deadline)
    plans, jobs = FEW_PLANS if dry else PLANS, 1
    if device == "cuda":
        jobs = torch.cuda.get_device_properties(0).total_memory // _ROOM_BYTES

    def measured(name: str) -> dict[str, Any] | str:
        try:
            _run(["train", "--plan", name, *common], deadline)
        except TimeUpError as error:
            return str(error)
        found: dict[str, Any] = json.loads((folder / f"{name}-measured.json").read_text())
        return found

    with ThreadPoolExecutor(max(1, min(len(plans), jobs))) as pool:
        try:
            found = dict(zip(plans, pool.map(measured, plans), strict=True))
        except BaseException:
            deadline.interrupt()
            raise
    late = {name: one for name, one in found.items() if isinstance(one, str)}
    return [one for one in found.values() if not isinstance(one, str)], late


def _run(arguments: list[str], deadline: Deadline) -> None:
    done = deadline.run([sys.executable, "-m", "benchmarks.gpu.predictions", *arguments])
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-40:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("phase", choices=("prepare", "train"))
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--plan", choices=PLANS)
    parser.add_argument("--dry", action="store_true", help="a tiny model")
    given = parser.parse_args()
    logging.getLogger("osdp_compile").setLevel(logging.WARNING)
    size, device = SMALL if given.dry else FULL, torch.device(given.device)
    if given.phase == "prepare":
        with _few_evaluations() if given.dry else contextlib.nullcontext():
            prepare(size, device, given.folder)
        return
    found = train(size, device, given.folder, given.plan)
    (given.folder / f"{given.plan}-measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
