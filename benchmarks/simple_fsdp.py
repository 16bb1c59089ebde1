"""A small SimpleFSDP: a peer to compare with, after arXiv 2411.00284.

Every parameter is a DTensor sharded by rows. Reading it gathers it; the gradient of that
is a reduce-scatter that averages. The gather may run under activation checkpointing, so that
the backward gathers again in place of keeping what the forward gathered. All of it is
plain torch, which torch.compile traces into one graph and Inductor compiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils import _runtime_estimation
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from passes.annotate.annotate_costs import collective_full_bytes
from passes.annotate.flops import flops_of
from passes.graph.fx_utils import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from passes.types.hardware import wire_bytes


def shard(model: nn.Module, mesh: DeviceMesh, again: bool = True) -> nn.Module:
    """Shard a model in place; every rank must hold the same values. Returns the model.

    ``again``: gather again in the backward.
    """
    for module in list(model.modules()):
        owned = {name: p for name, p in module._parameters.items() if p is not None}
        if not owned:
            continue
        for name, parameter in owned.items():
            # None: every rank cuts its rows out of what it has, nothing is sent.
            rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(rows)
        readers = {name: property(partial(_read, name=name, again=again)) for name in owned}
        module.__class__ = type(type(module).__name__, (type(module),), readers)
    return model


def _read(module: nn.Module, name: str, again: bool) -> Tensor:
    if not again:
        return _gather(module._parameters[name])  # type: ignore[arg-type]
    whole: Tensor = checkpoint(
        _gather, module._parameters[name], use_reentrant=False, context_fn=_contexts
    )
    return whole


def _gather(parameter: DTensor) -> Tensor:
    whole = parameter.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial("avg")])


def _recompute_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_recompute_all)


def compiled(model: nn.Module, mesh: DeviceMesh) -> Any:
    """The model sharded and compiled with Inductor."""
    return torch.compile(shard(model, mesh))


def compiled_with_overlap(
    model: nn.Module,
    mesh: DeviceMesh,
    bytes_per_second: float,
    flops_per_second: float,
    again: bool = True,
) -> Any:
    """The same with Inductor's own overlap scheduling and bucketing.

    It knows no CPU and no gloo, so it is told what things take, from these rates of one rank;
    where it would ask triton for a GPU's, too.
    """
    told: Any = _runtime_estimation
    told.get_gpu_dram_gbps = lambda: _MEMORY_BYTES_PER_SECOND / 1e9
    told.get_device_tflops = lambda dtype: flops_per_second / 1e12

    def estimated_milliseconds(node: fx.Node, override_bytes: int | None = None) -> float:
        target: Any = node.target
        kind = _SENT_AS.get(target)
        if kind is not None:
            full_bytes = collective_full_bytes(node) if override_bytes is None else override_bytes
            return 1e3 * wire_bytes(kind, full_bytes, mesh.size()) / bytes_per_second
        return 1e3 * flops_of(node) / flops_per_second

    distributed = "aten_distributed_optimizations."
    options: dict[str, Any] = {
        distributed + "enable_overlap_scheduling": True,
        distributed + "collective_bucketing": True,
        distributed + "insert_overlap_deps": True,
        distributed + "compute_estimator": "analytical",
        distributed + "custom_runtime_estimation": estimated_milliseconds,
        "fx_graph_cache": False,  # its key would have to hold that function
    }
    return torch.compile(shard(model, mesh, again), options=options)


#: Of one core of a server.
_MEMORY_BYTES_PER_SECOND = 15e9
#: What goes over gloo's wire: a reduce-scatter is an all-reduce there.
_SENT_AS = {ALL_GATHER: "all_gather", REDUCE_SCATTER: "all_reduce", ALL_REDUCE: "all_reduce"}
