"""The DTensor of a parameter: its placements and the local tensor of this rank, as a plan says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from osdp_compile.model.other_dims import OtherDims
from passes.types.decision import Decision
from passes.types.shard_layout import ShardLayout


def placements_of(
    decision: Decision, ndim: int, dim: int = 0, others: OtherDims | None = None
) -> list[Placement]:
    """A parameter's placement on each mesh dimension: on ours, and then on others.

    ``ndim``: the number of dimensions. ``dim``: the parameter's sharded dimension.
    """
    if others is not None:
        return others.with_ours(placements_of(decision, ndim - others.mesh.ndim, dim))
    if decision.within_host:
        return [Replicate(), Shard(dim)]
    return [Shard(dim) if decision.sharded else Replicate()] * ndim


def lay_out(
    full: Tensor,
    mesh: DeviceMesh,
    decision: Decision,
    cut: ShardLayout,
    others: OtherDims | None = None,
) -> DTensor:
    """A DTensor; this rank holds its rows (sharded) or the whole value.

    Without communication: every rank must hold the same ``full``. With ``others``, it is the part
    of this rank in their mesh, and ``mesh`` has our dimensions and theirs.
    """
    placements = placements_of(decision, mesh.ndim, cut.dim, others)
    if others is not None:
        return DTensor.from_local(
            _local_rows(full, cut) if decision.sharded else full,
            mesh,
            placements,
            run_check=False,
            shape=others.shape,
            stride=others.stride,
        )
    if not decision.sharded:
        return DTensor.from_local(full, mesh, placements, run_check=False)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(
        _local_rows(full, cut), mesh, placements, run_check=False, shape=full.shape, stride=stride
    )


def _local_rows(full: Tensor, cut: ShardLayout) -> Tensor:
    """This rank's rows of a tensor; a copy, so that the whole can be freed."""
    start, stop = cut.rows(full.shape[cut.dim])
    rows = full.narrow(cut.dim, start, stop - start)
    return rows.clone(memory_format=torch.contiguous_format)


def part_of_whole(
    mesh: DeviceMesh, decision: Decision, cut: ShardLayout, others: OtherDims | None
) -> Callable[[Tensor], DTensor]:
    """The layout of a parameter that is whole over all mesh dimensions."""

    def part(whole: Tensor) -> DTensor:
        local = whole if others is None else others.local_of(whole)
        return lay_out(local, mesh, decision, cut, others)

    return part
