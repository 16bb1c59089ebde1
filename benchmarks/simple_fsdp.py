"""A small SimpleFSDP: a peer to compare with, after arXiv 2411.00284.

Every parameter is a DTensor sharded by rows. Reading it gathers it; the gradient of that
is a reduce-scatter that averages. The gather runs under activation checkpointing, so that
the backward gathers again in place of keeping what the forward gathered. All of it is
plain torch, which torch.compile traces into one graph and Inductor compiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a model in place; every rank must hold the same values. Returns the model."""
    for module in list(model.modules()):
        owned = {name: p for name, p in module._parameters.items() if p is not None}
        if not owned:
            continue
        for name, parameter in owned.items():
            # None: every rank cuts its rows out of what it has, nothing is sent.
            rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(rows)
        readers = {name: property(partial(_read, name=name)) for name in owned}
        module.__class__ = type(type(module).__name__, (type(module),), readers)
    return model


def _read(module: nn.Module, name: str) -> Tensor:
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
