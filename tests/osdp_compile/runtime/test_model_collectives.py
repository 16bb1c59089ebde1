"""A model's own collectives, by messages and by the backend's own."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import osdp_compile.runtime.model_collectives  # noqa: F401
from osdp_compile.runtime.eager_markers import register_group


def results(rank, world_size, native):
    with mock.patch.dict(os.environ, {"OSDP_NATIVE_COLLECTIVES": str(int(native))}):
        return communicated(rank, world_size)


def communicated(rank, world_size):
    group = register_group(dist.group.WORLD)
    table = torch.arange(4 * 3, dtype=torch.float64).view(4, 3).t() * (rank + 1)  # not contiguous
    table = torch.cat([table, table[:1]])  # four rows
    osdp = torch.ops.osdp
    return {
        "sum": osdp.model_all_reduce(table, "sum", group),
        "max": osdp.model_all_reduce(table, "max", group),
        "gather": osdp.model_all_gather(table, world_size, group),
        "scatter": osdp.model_reduce_scatter(table, "sum", world_size, group),
        "average": osdp.model_reduce_scatter(table, "avg", world_size, group),
        "least": osdp.model_reduce_scatter(table, "min", world_size, group),
        "own": table,
    }


@pytest.mark.parametrize("native", [False, True], ids=["messages", "gloo"])
def test_results_are_those_of_the_collectives(two_ranks, native):
    found = two_ranks.run(results, native)
    own = torch.stack([one.pop("own") for one in found])
    for rank, one in enumerate(found):
        rows = slice(2 * rank, 2 * rank + 2)
        expected = {
            "sum": own.sum(0),
            "max": own.amax(0),
            "gather": own.flatten(0, 1),
            "scatter": own.sum(0)[rows],
            "average": own.mean(0)[rows],
            "least": own.amin(0)[rows],
        }
        for name, value in expected.items():
            assert torch.equal(one[name], value), (rank, name)
