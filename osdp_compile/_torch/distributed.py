"""Process groups, meshes, pipeline stages, and the marks of DDP and FSDP."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn

# 2.11.0 to 2.15.0: makes wait_tensor(tensor) wait for a Work; a tensor can have several.
from torch._C._distributed_c10d import _register_work as register_work

# 2.13.0, 2.15.0: the process group of a name.
from torch._C._distributed_c10d import _resolve_process_group as process_group
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "fake_store",
    "flattened",
    "is_marked_by_fsdp",
    "is_process_group",
    "microbatches_of",
    "pipeline_part",
    "process_group",
    "reduced_by_ddp",
    "register_work",
    "root_mesh",
]


def reduced_by_ddp() -> list[nn.Parameter]:
    """The parameters of the DistributedDataParallel module being called, if any."""
    # 2.11.0 to 2.15.0: Dynamo itself calls this to split graphs at DDP's buckets.
    active = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return [] if active is None else list(active._module_parameters)


def pipeline_part(frame: FrameType) -> Any:
    """The pipeline stage or schedule whose method the frame runs; None: of neither."""
    # 2.13.0, 2.15.0: the files and the base classes of stages and of schedules.
    for file, base in (("stage", "_PipelineStageBase"), ("schedules", "_PipelineSchedule")):
        module = sys.modules.get(f"torch.distributed.pipelining.{file}")
        if module is not None and frame.f_code.co_filename == module.__file__:
            own = frame.f_locals.get("self")
            return own if isinstance(own, getattr(module, base)) else None
    return None


def microbatches_of(schedule: Any) -> int:
    """The microbatches of a pipeline schedule's step."""
    found: int = schedule._n_microbatches  # 2.13.0, 2.15.0
    return found


def is_marked_by_fsdp(module: nn.Module) -> bool:
    """Whether a module is inside one that FSDP1 or FSDP2 shards."""
    # 2.11.0 to 2.15.0: both mark modules for Dynamo with this attribute.
    return bool(module.__dict__.get("_is_fsdp_managed_module", False))


def fake_store() -> Any:
    """A store for the "fake" process group backend, whose collectives do nothing."""
    # 2.11.0 to 2.15.0: imported here, because the import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The one-dimensional mesh over a named mesh's ranks, made once. Collective."""
    # 2.13.0: DeviceMesh._flatten; ``mesh["host_gpu"]`` finds it afterwards.
    return mesh._flatten()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which this one is some dimensions; itself if it is no part."""
    # 2.13.0, 2.15.0: DeviceMesh._get_root_mesh
    return mesh._get_root_mesh()


def is_process_group(name: Any) -> bool:
    """Whether functional collectives know a group of this name."""
    try:
        process_group(name)
    except RuntimeError:
        return False
    return True
