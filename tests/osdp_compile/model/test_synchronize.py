"""Rank 0's values reach all ranks while rank 0 does something else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from osdp_compile.errors import OsdpError, PlanMismatch
from osdp_compile.model.agreement import from_rank_zero
from osdp_compile.model.synchronize import differing, synchronize, synchronized

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


def values(rank):
    """Tensors by name: equal on all ranks, or not, and of several kinds."""
    base = torch.arange(4096.0)
    inside = base.clone()
    inside[2000] += rank
    return {
        "equal": base.clone(),
        "at its end": torch.cat([base, torch.tensor([float(rank)])]),
        "inside": inside,
        "equal number": torch.tensor(3),
        "number": torch.tensor(rank),
        "equal, of another type": base.bfloat16().reshape(64, 64),
        "flags": torch.tensor([True, rank == 0]),
        "nothing": torch.empty(0, 3),
        "equal but strided": base.clone().view(64, 64).t(),
        "equal in value, not in bytes": torch.tensor([0.0 if rank else -0.0]),
        "equal, complex": torch.complex(base, base),
    }


def those_that_travel(rank, world_size):
    tensors = values(rank)
    found = {*map(id, differing(list(tensors.values()), dist.group.WORLD))}
    names = [name for name, tensor in tensors.items() if id(tensor) in found]
    synchronize(tensors.values(), dist.group.WORLD)
    wanted = values(0)
    return names, [n for n in tensors if not torch.equal(tensors[n], wanted[n])]


def test_only_tensors_that_differ_travel(two_ranks):
    names = ["at its end", "inside", "number", "flags"]
    names += ["equal but strided", "equal in value, not in bytes"]
    assert two_ranks.run(those_that_travel) == [(names, [])] * 2


def other_number_of_buffers(rank, world_size):
    tensors = [torch.ones(2)] * (1 + rank)
    return len(differing(tensors, dist.group.WORLD))


def test_ranks_with_another_number_of_tensors_compare_none(two_ranks):
    assert two_ranks.run(other_number_of_buffers) == [1, 2]
