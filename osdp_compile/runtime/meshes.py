"""Device meshes: all ranks as one flat group, or two dimensions (hosts, ranks of a host)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from osdp_compile import _torch
from osdp_compile.runtime.collectives import Group
from passes.types.context import MeshDim
from passes.types.hardware import Hardware
from passes.types.plan import Plan
from passes.types.shard_layout import ShardLayout


def number_of_ranks(mesh: DeviceMesh | None) -> int:
    """The number of ranks that train a model; 1 without a process group.

    ``mesh``: the user's option (None: all ranks).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    size: int = dist.get_world_size() if mesh is None else mesh.size()
    return size


def flat_mesh(mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """The one-dimensional mesh over all ranks of a mesh. Collective.

    ``mesh``: the user's option, checked by :func:`check_mesh` (None: all ranks).
    """
    if mesh is None:
        return init_device_mesh(device_type, (dist.get_world_size(),))
    return mesh if mesh.ndim == 1 else _torch.distributed.flattened(mesh)


def group_of_mesh(mesh: DeviceMesh | None) -> Group:
    """The ranks of a flat mesh; None: one rank."""
    return None if mesh is None else mesh.get_group()


def mesh_of_shards(mesh: DeviceMesh, along: Mapping[str, dist.ProcessGroup]) -> DeviceMesh:
    """A two-dimensional mesh for DTensors with ``[Shard(0), Shard(0)]``; it is never flattened.

    On a flattened mesh torch 2.13 gathers ``[Shard(0), Shard(0)]`` in one collective, as if the
    rows were sharded over all ranks at once. That is wrong for uneven rows.

    ``along``: the groups of the mesh (:func:`groups_along`).
    """
    return DeviceMesh.from_group(
        list(along.values()), mesh.device_type, mesh.mesh, mesh_dim_names=tuple(along)
    )


def own_mesh(flat: DeviceMesh, given: DeviceMesh | None, plan: Plan) -> DeviceMesh:
    """The mesh of a model's DTensors: two-dimensional if the plan shards within hosts.

    ``flat``: the mesh over all ranks. ``given``: the user's option.
    """
    if plan.within_hosts and given is not None:
        return mesh_of_shards(given, groups_along(given))
    return flat


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(parameter: DTensor, local: Tensor) -> DTensor:
    """This rank's part of a tensor as a DTensor with the mesh and placements of a parameter."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def cuts_of(tensor: DTensor) -> list[tuple[int, int]] | None:
    """A tensor's cuts in their order: pairs of a mesh dimension and the dimension that it cuts.

    Those of ``parallelize_module`` come before ours, which are strided placements along the same
    dimension. None: rows are strided otherwise, in a view of a parameter.
    """
    mesh: DeviceMesh = tensor.device_mesh
    placements: Sequence[Any] = tensor.placements
    cuts = [(at, one.dim) for at, one in enumerate(placements) if not one.is_replicate()]
    strided = {at: _torch.dtensor.split_factor(placements[at]) for at, _ in cuts}
    first = [cut for cut in cuts if strided[cut[0]] is None]
    then = [cut for cut in cuts if strided[cut[0]] is not None]
    for at, dim in then:
        before = math.prod(mesh.size(one) for one, cut in first if one > at and cut == dim)
        if strided[at] != before:
            return None
    return [*first, *then]


def span_of(tensor: DTensor, mesh_dim: int, place: int, total: int) -> tuple[int, int]:
    """First and last (exclusive) of ``total`` rows that a place along a mesh dimension has."""
    return ShardLayout(tensor.device_mesh.size(mesh_dim), place, "").rows(total)


def own_rows(full: Tensor, tensor: DTensor) -> Tensor:
    """This rank's part of ``full``, cut as ``tensor`` is: a view, where its rows are adjacent."""
    mesh, cuts = tensor.device_mesh, cuts_of(tensor)
    if cuts is None:
        everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=tensor.placements).to_local()
    for mesh_dim, dim in cuts:
        start, stop = span_of(tensor, mesh_dim, mesh.get_local_rank(mesh_dim), full.shape[dim])
        full = full.narrow(dim, start, stop - start)
    return full


def groups_along(mesh: DeviceMesh | None) -> dict[str, dist.ProcessGroup]:
    """This rank's groups by mesh dimension, the outer first; empty for a flat mesh.

    A mesh with one dimension, or with one rank along a dimension, counts as flat.
    """
    if mesh is None or mesh.ndim == 1 or 1 in mesh.shape:
        return {}
    assert mesh.mesh_dim_names is not None
    return {name: mesh.get_group(name) for name in mesh.mesh_dim_names}


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse an unsupported mesh.

    Raises:
        ValueError: for more than two dimensions, two without names, or ranks that are not in
            ascending order; says what to give.
    """
    names = mesh.mesh_dim_names
    if mesh.ndim > 2:
        pick = f"mesh[{names[0]!r}]" if names else "a mesh with one dimension"
        two = f"mesh[{names[0]!r}, {names[1]!r}]" if names else "one with two"
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions, one or two are supported: give {pick}, or {two} "
            "(hosts, ranks of a host)"
        )
    if mesh.ndim == 2:
        if not names:
            raise ValueError(
                "the mesh has two dimensions without names: make it with mesh_dim_names, such as "
                "('host', 'gpu')"
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(
                f"the mesh's ranks {ranks} are not in ascending order along {names[0]!r} and then "
                f"{names[1]!r}"
            )


def mesh_dim(name: str, group: dist.ProcessGroup) -> MeshDim:
    """The passes' ``MeshDim`` of a mesh dimension."""
    return MeshDim(name, group.size(), group.group_name)


def mesh_dims_of(
    mesh_dims: Sequence[MeshDim], hardware: Hardware, uses_p2p: bool
) -> tuple[MeshDim, MeshDim] | None:
    """The two mesh dimensions, if the profile has rates for all collectives along both; else None.

    ``mesh_dims``: the dimensions, the outer first. None also for a mesh with one dimension, or with
    one rank along a dimension. ``uses_p2p``: as in the passes' context.
    """
    if len(mesh_dims) != 2 or any(one.size == 1 for one in mesh_dims):
        return None
    needed = {"all_gather", "all_reduce", "all_to_all"}
    if not uses_p2p:
        needed.add("reduce_scatter")
    if any(needed - set(hardware.dimensions.get(one.name, ())) for one in mesh_dims):
        return None
    outer, inner = mesh_dims
    return outer, inner
