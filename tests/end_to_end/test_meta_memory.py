"""What a model that never fits whole takes on each rank while it is built and loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import osdp_compile
from osdp_compile import Decision, PeakMemory
from tests.training import mixed_plan, whole

WIDTH, LAYERS = 256, 8
PARAMETER_BYTES = 4 * WIDTH * WIDTH
WHOLE_BYTES = LAYERS * PARAMETER_BYTES
#: Small things: a few tensors of one row or one number.
_SLACK_BYTES = 1 << 14


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def built_and_loaded(rank, world_size, path, tp=1):
    """Peaks of building on the meta device, and of loading a whole checkpoint into it.

    ``tp``: ranks along another dimension, over which the model is distributed before.
    """
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    with PeakMemory() as building:
        with torch.device("meta"):
            model = layers()
        if tp > 1:
            ways = [ColwiseParallel(), RowwiseParallel()] * (LAYERS // 2)
            parallelize_module(model, mesh["tp"], {str(at): way for at, way in enumerate(ways)})
        decisions = [Decision.SHARD_REGATHER]
        ranks = world_size // tp
        plan = mixed_plan(model, decisions, bucket_bytes=1 << 20, world_size=ranks)
        osdp_compile.shard(model, plan, mesh=mesh["dp"])
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model:
            module.reset_parameters()
    same = [torch.equal(whole(p), q) for p, q in zip(model.parameters(), drawn(), strict=True)]
    with PeakMemory() as loading:
        model.load_state_dict(torch.load(path, mmap=True))
    loaded = torch.load(path)
    same += [torch.equal(whole(p), loaded[name]) for name, p in model.named_parameters()]
    return building.peak_bytes, loading.peak_bytes, all(same)


def drawn() -> list[torch.Tensor]:
    """The parameters that one process draws from the seed."""
    model = layers()
    torch.manual_seed(0)
    for module in model:
        module.reset_parameters()
    return [*model.parameters()]


@pytest.mark.parametrize("tp", [1, 2])
def test_building_takes_the_rows_and_one_parameter_and_loading_one_parameter(
    four_ranks, tmp_path, tp
):
    path = str(tmp_path / "whole.pt")
    torch.manual_seed(1)
    torch.save(layers().state_dict(), path)
    for building_bytes, loading_bytes, same in four_ranks.run(built_and_loaded, path, tp):
        assert same
        rows_bytes = WHOLE_BYTES // 4
        assert rows_bytes < building_bytes <= rows_bytes + PARAMETER_BYTES + _SLACK_BYTES
        assert loading_bytes <= PARAMETER_BYTES + _SLACK_BYTES
