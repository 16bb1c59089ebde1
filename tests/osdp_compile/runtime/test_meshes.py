"""Meshes: flat or of two dimensions, and which are refused. Fake ranks: nothing is communicated."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from osdp_compile.runtime.meshes import check_mesh, flat_mesh, groups_along, mesh_dims_of
from osdp_compile.trace import fake_world
from passes.types.context import MeshDim
from passes.types.hardware import generic


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def test_a_mesh_of_two_dimensions_is_flat_in_the_order_of_its_ranks():
    with fake_world(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("host", "gpu"))
        check_mesh(mesh)
        flat, along = flat_mesh(mesh, "cpu"), groups_along(mesh)
        assert (flat.ndim, flat.get_local_rank()) == (1, 5)
        assert ranks_of(flat.get_group()) == list(range(8))
        assert {name: ranks_of(group) for name, group in along.items()} == {
            "host": [1, 5],
            "gpu": [4, 5, 6, 7],
        }


def test_two_dimensions_of_a_larger_mesh():
    with fake_world(8, rank=5):
        whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("host", "gpu", "tensor"))
        mesh = whole["host", "gpu"]
        check_mesh(mesh)
        assert ranks_of(flat_mesh(mesh, "cpu").get_group()) == [1, 3, 5, 7]
        assert [ranks_of(group) for group in groups_along(mesh).values()] == [[1, 5], [5, 7]]


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_one_rank_along_a_dimension_is_no_dimension(shape):
    with fake_world(4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("host", "gpu"))
        assert flat_mesh(mesh, "cpu").size() == 4
        assert groups_along(mesh) == {}


def test_levels_need_all_rates_along_both_dimensions():
    mesh_dims = [MeshDim("host", 2, "hosts"), MeshDim("gpu", 4, "gpus")]
    both = generic(dimensions=("host", "gpu"))
    assert mesh_dims_of(mesh_dims, both, uses_p2p=False) == tuple(mesh_dims)
    assert mesh_dims_of(mesh_dims, generic(), uses_p2p=False) is None
    assert mesh_dims_of(mesh_dims, generic(dimensions=("host",)), uses_p2p=False) is None
    del both.dimensions["gpu"]["reduce_scatter"]  # which messages do not need
    assert mesh_dims_of(mesh_dims, both, uses_p2p=False) is None
    assert mesh_dims_of(mesh_dims, both, uses_p2p=True) is not None
    assert mesh_dims_of([], both, uses_p2p=True) is None


def test_ranks_out_of_order_are_refused():
    with fake_world(4):
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("host", "gpu"))
        with pytest.raises(ValueError, match=r"\[0, 2, 1, 3\] are not in ascending order along"):
            check_mesh(mesh)
