"""Pipeline stages: the stage of ``torch.distributed.pipelining`` that calls the model now.

A stage calls its module for a microbatch, and for others before the first one's backward. The
Python stack shows the stage and its schedule.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.runtime.current_call import stack


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The pipeline of a call.

    ``ranks``: of its stages, in the world. ``scales``: its schedule divides gradients by the number
    of microbatches. ``microbatches``: of a step. ``in_flight``: those whose activations the stage
    holds at a time. ``is_last``: no later stage sends gradients to this one.
    """

    ranks: tuple[int, ...]
    scales: bool
    microbatches: int
    in_flight: int
    is_last: bool


def current_pipeline() -> Pipeline | None:
    """The pipeline of which a stage is being called; None: there is none."""
    found = [part for part in map(_torch.distributed.pipeline_part, stack()) if part is not None]
    stages = [one for one in found if hasattr(one, "stage_index")]
    if not stages:
        return None
    group = dist.group.WORLD if stages[0].group is None else stages[0].group
    schedules = [one for one in found if not hasattr(one, "stage_index")]
    scales = any(one.scale_grads for one in schedules)
    microbatches = max((_torch.distributed.microbatches_of(one) for one in schedules), default=1)
    in_flight = microbatches
    if schedules and all(type(one).__name__ == "Schedule1F1B" for one in schedules):
        in_flight = min(microbatches, stages[0].num_stages - stages[0].stage_index)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Pipeline(ranks, scales, microbatches, in_flight, stages[0].is_last)


def check_ranks(mesh: DeviceMesh | None) -> None:
    """Refuse a mesh with ranks of several stages, if the model is called as a stage.

    ``mesh``: the user's option (None: all ranks).

    Raises:
        OsdpError: naming the option.
    """
    pipeline = current_pipeline()
    if pipeline is None:
        return
    ours = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
    both = sorted(set(ours) & set(pipeline.ranks))
    if len(both) > 1:
        raise OsdpError(
            f"the model is a stage of the pipeline over the ranks {list(pipeline.ranks)}, and "
            f"options={{'mesh'}} has the ranks {both} of several stages: give the ranks that "
            "train the same stage, options={'mesh': mesh['dp']} of a mesh with 'dp' and 'pp'"
        )


def check_no_sync() -> None:
    """Refuse a schedule that divides gradients before ``no_sync`` hands them over.

    The caller is inside ``no_sync``.

    Raises:
        OsdpError: with what to give the schedule.
    """
    pipeline = current_pipeline()
    if pipeline is not None and pipeline.scales:
        raise OsdpError(
            "no_sync around a pipeline's schedule: the schedule divides the gradients by the "
            "number of microbatches before no_sync has reduced them, so they would stay too large. "
            "Give the schedule scale_grads=False, and divide the loss by the number of "
            "microbatches; or leave no_sync out"
        )
