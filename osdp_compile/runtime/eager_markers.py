"""The eager implementation of the markers, for code outside a compiled graph.

In eager code after a graph break, in an uncompiled evaluation, and in the backward of either, the
read of a parameter gathers it, and its gradient is reduced at the same place. The result is
correct, without any overlap.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

import passes.ops.markers
import passes.ops.packing  # noqa: F401  (these two define the operators)
from osdp_compile import _torch
from osdp_compile.runtime.collectives import all_gather_single, reduce_scatter_single
from osdp_compile.runtime.written_reads import watch_gathered

# Weak references: ``destroy_process_group`` does not tear down a group that is still referenced,
# and that group's threads may abort the process while Python shuts down.
_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def register_group(group: dist.ProcessGroup) -> str:
    """Register a process group for the eager markers; returns its name in graphs."""
    name: str = group.group_name
    _groups[name] = group
    return name


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of this name."""
    if name not in _groups:
        raise RuntimeError(
            f"process group {name!r} of a sharded parameter is gone: the model was sharded under "
            "a process group that is destroyed; build the model after init_process_group"
        )
    return _groups[name]


@torch.library.impl("osdp::unshard", "CompositeExplicitAutograd")
def _unshard(
    shard: Tensor,
    name: str,
    shape: list[int],
    sharded: bool,
    group_name: str,
    between: str = "",
    hosts: int = 1,
    dim: int = 0,
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    if not sharded:
        return shard.to(dtype or shard.dtype, copy=True)
    if dim:  # the shards of the transposed parameter are its rows
        turned, sizes = shard.movedim(dim, 0), [shape[dim], *shape[:dim], *shape[dim + 1 :]]
        marks = group_name, between, hosts
        whole: Tensor = torch.ops.osdp.unshard(turned, name, sizes, True, *marks, dtype=dtype)
        return whole.movedim(0, dim).contiguous()
    shard = shard.to(dtype or shard.dtype)
    group = group_of(group_name)
    ranks = group.size()
    rows = -(-shape[0] // ranks)
    if shard.shape[0] != rows:
        shard = torch.ops.osdp.pad_rows(shard, rows)
    full = shard.new_empty([rows * ranks, *shape[1:]])
    all_gather_single(full, shard.contiguous(), group=group)
    if rows * ranks == shape[0]:
        return full
    unpacked: Tensor = torch.ops.osdp.unpack(full, ranks, 0, shape, hosts=hosts)
    return unpacked


@torch.library.impl("osdp::reduce_grad", "CompositeExplicitAutograd")
def _reduce_grad(
    grad: Tensor,
    shard: Tensor,
    name: str,
    sharded: bool,
    group_name: str,
    between: str = "",
    hosts: int = 1,
    dim: int = 0,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    if not group_name:  # one rank: nothing travels
        return grad.to(shard.dtype, copy=True)
    if dim:
        turned = grad.movedim(dim, 0), shard.movedim(dim, 0)
        marks = group_name, between, hosts
        rows_first: Tensor = torch.ops.osdp.reduce_grad(
            *turned, name, True, *marks, reduce_dtype=reduce_dtype
        )
        return rows_first.movedim(0, dim).contiguous()
    grad = grad.to(reduce_dtype or grad.dtype)
    group = group_of(group_name)
    ranks, replicas = group.size(), group_of(between) if between else None
    mean = (grad / (ranks * (replicas.size() if replicas else 1))).contiguous()
    if not sharded:
        dist.all_reduce(mean, group=group)
        return mean.to(shard.dtype)
    rows = -(-grad.shape[0] // ranks)
    reduced = mean.new_empty([rows, *grad.shape[1:]])
    if rows * ranks != grad.shape[0]:
        mean = torch.ops.osdp.pack_columns([mean], ranks, hosts=hosts)
    reduce_scatter_single(reduced, mean.view(rows * ranks, *grad.shape[1:]), group=group)
    if replicas is not None:
        dist.all_reduce(reduced, group=replicas)
    own = reduced[: shard.shape[0]].clone() if shard.shape[0] != rows else reduced
    return own.to(shard.dtype)


class _Replicated(torch.autograd.Function):
    """Eager read of a replicated parameter: identity; the backward all-reduces the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, name: str, group_name: str) -> Tensor:
        ctx.name, ctx.group_name = name, group_name
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        reduced = torch.ops.osdp.reduce_grad(grad, grad, ctx.name, False, ctx.group_name)
        return reduced, None, None


def read(
    local: Tensor,
    name: str,
    shape: tuple[int, ...],
    sharded: bool,
    *marks: str | int,
    **dtypes: torch.dtype,
) -> Tensor:
    """The full parameter from this rank's part. Differentiable; a marker in a trace.

    Args:
        local: this rank's rows ``[rows/N, ...]`` if sharded, else the whole parameter.
        shape: of the whole parameter.
        marks: :attr:`passes.types.shard_layout.ShardLayout.marks`. The first one is the group's
            name, "" for one rank.
        dtypes: :meth:`osdp_compile.model.mixed_precision.Precision.marks`.
    """
    whole: Tensor = local
    if sharded or dtypes or torch.compiler.is_compiling():
        whole = torch.ops.osdp.unshard(local, name, shape, sharded, *marks, **dtypes)
        if sharded and not torch.compiler.is_compiling():
            watch_gathered(name, whole)
    elif torch.is_grad_enabled() and marks[0]:
        whole = _Replicated.apply(local, name, *marks)  # type: ignore[no-untyped-call, unused-ignore]
    return whole


# Frames that Dynamo could not trace (nn.LSTM's) call this; Dynamo must not compile it by itself.
_torch.dynamo.skip_code(read.__code__)
