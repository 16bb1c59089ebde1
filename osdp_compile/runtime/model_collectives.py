"""A model's own collectives (``passes/ops/model_collectives.py``): they run and are waited for.

On gloo gathers and scatters are P2P messages, for the reasons in ``osdp_compile/runtime/p2p.py``.
Torch looks up the groups: DTensor's caches may name a group of an equal mesh that was made before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

import passes.ops.model_collectives  # noqa: F401  (defines the operators)
from osdp_compile import _torch
from osdp_compile.runtime.p2p import group_uses_p2p, start_exchange, start_gather

_c10d = torch.ops._c10d_functional


def groups_named(node: fx.Node) -> list[str]:
    """The process groups that an operator names: a collective, or a custom one with some inside."""
    given = (*node.args, *node.kwargs.values())
    return [
        one for one in given if isinstance(one, str) and _torch.distributed.is_process_group(one)
    ]


def _group_of(name: Any) -> dist.ProcessGroup:
    return _torch.distributed.process_group(name)


def _waited(started: Tensor) -> Tensor:
    result: Tensor = _c10d.wait_tensor(started)
    return result


@torch.library.impl("osdp::model_all_reduce", "CompositeExplicitAutograd")
def _all_reduce(input: Tensor, reduction: str, group_name: str) -> Tensor:
    return _waited(_c10d.all_reduce(input.contiguous(), reduction, group_name))


@torch.library.impl("osdp::model_all_gather", "CompositeExplicitAutograd")
def _all_gather(input: Tensor, ranks: int, group_name: str) -> Tensor:
    group, part = _group_of(group_name), input.contiguous()
    if not group_uses_p2p(group, input.device):
        return _waited(_c10d.all_gather_into_tensor(part, ranks, group_name))
    gathered = part.new_empty([part.shape[0] * ranks, *part.shape[1:]])
    for work in start_gather(gathered.view(-1), part, group):
        work.wait()
    return gathered


@torch.library.impl("osdp::model_reduce_scatter", "CompositeExplicitAutograd")
def _reduce_scatter(input: Tensor, reduction: str, ranks: int, group_name: str) -> Tensor:
    group, table = _group_of(group_name), input.contiguous()
    if not group_uses_p2p(group, input.device):
        return _waited(_c10d.reduce_scatter_tensor(table, reduction, ranks, group_name))
    received = torch.empty_like(table)
    for work in start_exchange(received, table, group):
        work.wait()
    parts = received.view(ranks, table.shape[0] // ranks, *table.shape[1:])
    return _reduced(parts, reduction)


def _reduced(parts: Tensor, reduction: str) -> Tensor:
    if reduction in ("sum", "avg"):
        total = parts.sum(0)
        return total / parts.shape[0] if reduction == "avg" else total
    if reduction in ("max", "min"):
        return parts.amax(0) if reduction == "max" else parts.amin(0)
    raise ValueError(f"reduce-scatter of a model: reduction {reduction!r} is not supported on gloo")
