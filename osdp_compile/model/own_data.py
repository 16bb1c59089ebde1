"""Own data: the ranks along the parameters' own mesh dimensions have batches of their own.

With expert parallelism ``options={"mesh": mesh["dp", "ep"]}`` names the dimension ``ep`` on which
the experts are DTensors. Of these dimensions the backend shards over the others only. With one
batch for all ranks of ``ep``, as with tensor parallelism, gradients would be too small: the first
call compares the batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.model.agreement import on_every_rank
from osdp_compile.model.other_dims import group_of_everyone, mesh_of
from osdp_compile.runtime.collectives import backend_of


def beside_theirs(inputs: Sequence[Any], mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh dimensions to shard over: those of an option without those of the parameters.

    ``inputs``: of a graph. ``mesh``: the option; itself if it has no dimension beside theirs.
    """
    theirs = mesh_of(one for one in inputs if isinstance(one, nn.Parameter))
    if theirs is None or mesh is None:
        return mesh
    names, own = mesh.mesh_dim_names or (), set(theirs.mesh_dim_names or ())
    root = _torch.distributed.root_mesh(mesh)
    if not own or not own < set(names) or root != _torch.distributed.root_mesh(theirs):
        return mesh
    return root[tuple(one for one in names if one not in own)]


def check_batches(inputs: Sequence[Any], ours: DeviceMesh, theirs: DeviceMesh) -> None:
    """Refuse batches that are equal along the dimensions of the parameters. Collective.

    ``inputs``: of the first graph. ``ours``: the dimensions to shard over. ``theirs``: of the
    parameters.

    Raises:
        OsdpError: on every rank.
    """
    if backend_of(theirs.get_group(0), theirs.device_type) == "fake":
        return
    batch = [one for one in inputs if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)]
    own = _digest(batch, theirs.device_type)
    equal = [name for name in theirs.mesh_dim_names or () if _is_equal(own, theirs.get_group(name))]

    def check() -> None:
        if equal:
            raise OsdpError(
                f"the ranks along {equal[0]!r} have the same batch, and options={{'mesh'}} has "
                "this dimension of the parameters, as for ranks with batches of their own: leave "
                "it out, such as mesh['dp'] beside tensor parallelism"
            )

    on_every_rank(check, group_of_everyone(ours, theirs))


def _is_equal(own: Tensor, group: dist.ProcessGroup) -> bool:
    bounds = torch.stack([own, -own])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    return bool((bounds[0] == -bounds[1]).all())


def _digest(batch: Sequence[Tensor], device_type: str) -> Tensor:
    """Sums over the values and over their products with their places; equal for equal batches."""
    found = torch.zeros(2, dtype=torch.float64, device=device_type)
    for one in batch:
        values = one.detach().double().flatten()
        places = torch.arange(1, 1 + values.numel(), dtype=torch.float64, device=values.device)
        found += torch.stack([values.sum(), (values * places).sum()]).to(found.device)
    return found
