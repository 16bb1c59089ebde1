"""Do communication and computing run at the same time? One rank's kernels in a profiled step.

Started on every rank with torch.distributed's variables set; rank 0 writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.share import join_ranks
from benchmarks.train import Work
from osdp_compile import Plan
from osdp_compile.calibration.timed_collectives import synchronize

_WARMUP_STEPS = 3
_Spans = list[tuple[float, float]]


def united(spans: Iterable[tuple[float, float]]) -> _Spans:
    """The union of spans (begin, end), in order and apart."""
    found: _Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def common(ones: _Spans, others: _Spans) -> float:
    """The length of the intersection of two lists of spans, each in order and apart."""
    return sum(
        max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for one in ones for other in others
    )


def overlap_of(events: Iterable[Any]) -> dict[str, float]:
    """Seconds of NCCL's kernels, of all others, and of both at once, from a profiler's events."""
    spans: dict[bool, _Spans] = {True: [], False: []}
    for event in events:
        if event.device_type != DeviceType.CPU and not event.name.startswith("Mem"):
            span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
            spans["nccl" in event.name.lower()].append(span)
    sending, computing = united(spans[True]), united(spans[False])
    return {
        "nccl_seconds": sum(end - begin for begin, end in sending),
        "computing_seconds": sum(end - begin for begin, end in computing),
        "both_seconds": common(sending, computing),
    }


def measure(work: Work) -> dict[str, float]:
    """Train under an all-sharded plan; the overlap in one step of this rank."""
    model = work.model()
    plan = Plan.uniform(
        model.named_parameters(), "shard_regather", world_size=dist.get_world_size()
    )
    options: dict[str, Any] = {"plan": plan}
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        compiled(*work.inputs(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(_WARMUP_STEPS):
        step(number)
    device = torch.device(work.device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    dist.barrier()
    with profile(activities=activities) as trace:
        step(_WARMUP_STEPS)
        synchronize(device)
    return overlap_of(trace.events() or [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", required=True, help="a Work as JSON")
    parser.add_argument("--backend", required=True, help="of the process group")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    logging.getLogger("osdp_compile").setLevel(logging.WARNING)
    work = Work(**json.loads(given.work))
    join_ranks(work.device, given.backend)
    found = measure(work)
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
