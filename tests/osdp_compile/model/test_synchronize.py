"""Rank 0's values reach all ranks while rank 0 does something else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from osdp_compile.errors import OsdpError, PlanMismatch
from osdp_compile.model.agreement import from_rank_zero
from osdp_compile.model.synchronize import synchronized

pytestmark = pytest.mark.ranks


def refuse():
    raise PlanMismatch("no plan fits")


def sums_after(rank, world_size, fails):
    rows, columns = torch.full((3, 4), 1.0 + rank), torch.full((4, 3), 5.0 + rank).t()
    group = dist.group.WORLD
    beside = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))["tp"]
    placed = DTensor.from_local(rows, beside, [Replicate()], run_check=False)  # as a buffer may be
    made, refused = None, ""
    try:
        with synchronized([placed, columns], group):
            made = from_rank_zero(refuse if fails else lambda: "a plan", group)
    except OsdpError as error:
        refused = str(error)
    return made, refused, float(rows.sum()), float(columns.sum()), columns.is_contiguous()


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_hold_rank_zeros_values_when_the_plan_is_known(two_ranks, fails):
    own, other = two_ranks.run(sums_after, fails)
    assert own == other
    assert own[2:] == (12.0, 60.0, False)
    assert own[:2] == ((None, "no plan fits") if fails else ("a plan", ""))
