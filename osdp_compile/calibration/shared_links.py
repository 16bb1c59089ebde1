"""Shared links: the process groups of ours that use the links of the model's own collectives.

The groups along one mesh dimension use the links within hosts if each of them is on one host.
Otherwise they use the links between hosts, which are the slower ones. Two kinds of groups share
bandwidth if both use the links within hosts, or both those between hosts.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile.calibration.profile_cache import own_address
from osdp_compile.model.agreement import from_all
from osdp_compile.model.other_dims import whole_mesh
from osdp_compile.runtime.collectives import backend_of
from osdp_compile.runtime.meshes import groups_along
from passes.types.context import ModelGroup
from passes.types.hardware import Hardware


def model_groups(
    mesh: DeviceMesh,
    others: DeviceMesh,
    flat: dist.ProcessGroup,
    everyone: dist.ProcessGroup,
    given: Hardware | None,
) -> dict[str, ModelGroup]:
    """The groups of the model's own collectives by name, equal on all ranks but for the names.

    Collective.

    Args:
        mesh: the dimensions to shard over.
        others: the parameters' other dimensions.
        flat: the group of all ranks of ``mesh``. ``everyone``: that of both meshes together.
        given: the profile of the user's options. It has the ranks of a host for a fake group.
    """
    host_of = _hosts(everyone, others.device_type, given)
    ranks = whole_mesh(mesh, others).mesh
    hosts = torch.tensor([host_of[rank] for rank in ranks.flatten().tolist()]).view(ranks.shape)
    ours = {flat.group_name: cross_hosts(hosts, range(mesh.ndim))}
    for dim, group in enumerate(groups_along(mesh).values()):
        ours[group.group_name] = cross_hosts(hosts, [dim])
    found: dict[str, ModelGroup] = {}
    for index, name in enumerate(others.mesh_dim_names or ()):
        group, cross = others.get_group(index), cross_hosts(hosts, [mesh.ndim + index])
        beside = frozenset(own for own, crosses in ours.items() if crosses == cross)
        found[group.group_name] = ModelGroup(name, group.size(), beside)
    return found


def cross_hosts(hosts: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether a group along some dimensions of a mesh has ranks on several hosts.

    ``hosts``: the number of each rank's host, in the shape of the mesh.
    """
    others = [dim for dim in range(hosts.ndim) if dim not in dims]
    ordered = hosts.permute(*others, *dims)
    groups = ordered.reshape(-1, math.prod(hosts.shape[dim] for dim in dims))
    return bool((groups != groups[:, :1]).any())


def _hosts(
    everyone: dist.ProcessGroup, device_type: str, given: Hardware | None
) -> Mapping[int, int]:
    """The number of each rank's host. Collective."""
    ranks = dist.get_process_group_ranks(everyone)
    if backend_of(everyone, device_type) == "fake":
        known = None if given is None else given.hosts
        return {rank: 0 if known is None else rank // known.ranks for rank in ranks}
    named: list[Hashable] = from_all((socket.gethostname(), own_address()), everyone)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(named))}
    return {rank: numbers[host] for rank, host in zip(ranks, named, strict=True)}
