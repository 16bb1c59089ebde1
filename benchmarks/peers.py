"""The ways to train a model that are compared, each from a plain model to one to call."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import simple_fsdp
from benchmarks.tasks import units

Way = Callable[[nn.Module, dict[str, Any]], nn.Module]


def alone(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """No communication at all: what a step costs on its own."""
    return model


def alone_compiled(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """No communication, compiled with Inductor."""
    return torch.compile(model)  # type: ignore[return-value]


def ddp(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """DistributedDataParallel."""
    return DistributedDataParallel(model)


def ddp_compiled(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """DistributedDataParallel, compiled (Dynamo cuts the graph at its buckets)."""
    return torch.compile(DistributedDataParallel(model))  # type: ignore[return-value]


def fsdp2(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """fully_shard on every block and the root, as its documentation shows."""
    for unit in units(model):
        fully_shard(unit)
    fully_shard(model)
    return model


def fsdp2_as_one(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """fully_shard on the root alone: what a model of one block is cut into."""
    fully_shard(model)
    return model


def fsdp2_compiled(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """fully_shard, and every block compiled."""
    for unit in units(model):
        unit.compile()
    return fsdp2(model, options)


def _mesh(model: nn.Module) -> DeviceMesh:
    """All ranks, on the device of the model."""
    device = next(model.parameters()).device
    return init_device_mesh(device.type, (dist.get_world_size(),))


def simple_fsdp_compiled(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """SimpleFSDP, the whole model compiled with Inductor."""
    return simple_fsdp.compiled(model, _mesh(model))


def simple_fsdp_overlap(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """SimpleFSDP with Inductor's overlap scheduling; ``options``: the rates it is told."""
    return simple_fsdp.compiled_with_overlap(model, _mesh(model), **options)


def simple_fsdp_keep_overlap(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The same, what was gathered kept for the backward."""
    return simple_fsdp_overlap(model, {**options, "again": False})


def osdp(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """torch.compile(model, backend="osdp"); ``options`` are the backend's."""
    return torch.compile(model, backend="osdp", options=options)  # type: ignore[return-value]


def osdp_by_blocks(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The same for each of the model's blocks. The modules outside of them run in eager mode."""
    for block in model.get_submodule("blocks").children():
        block.compile(backend="osdp", options=options)
    return model


def osdp_on_mesh(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The same over a two-dimensional mesh: hosts, and the ranks of each."""
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // each, each), mesh_dim_names=("host", "rank")
    )
    return osdp(model, {**options, "mesh": mesh})


WAYS: dict[str, Way] = {
    "alone": alone,
    "alone + compile": alone_compiled,
    "DDP": ddp,
    "DDP + compile": ddp_compiled,
    "FSDP2": fsdp2,
    "FSDP2 as one": fsdp2_as_one,
    "FSDP2 + compile": fsdp2_compiled,
    "SimpleFSDP + compile": simple_fsdp_compiled,
    "SimpleFSDP + overlap": simple_fsdp_overlap,
    "SimpleFSDP keep + overlap": simple_fsdp_keep_overlap,
    "osdp": osdp,
    "osdp by blocks": osdp_by_blocks,
    "osdp on hosts": osdp_on_mesh,
}
