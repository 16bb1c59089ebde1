"""Shared links: which groups of ours use the links of the model's own collectives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from osdp_compile import _torch
from osdp_compile.calibration.shared_links import cross_hosts, model_groups
from osdp_compile.trace import fake_world
from passes.types.hardware import Hardware, Hosts, generic

NAMES = ("outer", "inner", "tp")
ALL = {"flat", "outer", "inner"}


def with_hosts(ranks: int) -> Hardware:
    profile = generic()
    return dataclasses.replace(profile, hosts=Hosts(ranks, profile.collectives))


@pytest.mark.parametrize(
    ("dims", "crosses"),
    [([0], True), ([1], False), ([2], False), ([1, 2], False), ([0, 2], True)],
)
def test_a_dimension_crosses_hosts_if_one_of_its_groups_does(dims, crosses):
    hosts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]).view(2, 2, 2)
    assert cross_hosts(hosts, dims) == crosses


def test_one_group_on_two_hosts_is_enough():
    assert cross_hosts(torch.tensor([[0, 0], [0, 1]]), [1])


@pytest.mark.parametrize(
    ("ranks_of_a_host", "beside"),
    [
        (2, set()),
        (4, {"inner"}),
        (8, {"flat", "outer", "inner"}),
        (None, {"flat", "outer", "inner"}),
    ],
)
def test_groups_of_ours_on_the_links_of_a_models_own(ranks_of_a_host, beside):
    """``tp`` is within hosts; hosts of two ranks have nothing else."""
    given = None if ranks_of_a_host is None else with_hosts(ranks_of_a_host)
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        ours = mesh["outer", "inner"]
        flat = _torch.distributed.flattened(ours).get_group()
        found = model_groups(ours, mesh["tp"], flat, dist.group.WORLD, given)
        named = {flat.group_name: "flat"}
        named |= {mesh.get_group(name).group_name: name for name in NAMES[:2]}
        ((group, own),) = found.items()
        assert group == mesh.get_group("tp").group_name
        assert (own.name, own.size) == ("tp", 2)
        assert {named[one] for one in own.beside} == beside
