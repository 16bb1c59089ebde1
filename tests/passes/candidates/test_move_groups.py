"""Move groups: found in the graph, in every layer, with the reasons of the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.candidates.move_groups import find_move_groups
from passes.pipeline import default_passes
from passes.plan.planner import make_plan
from passes.types.decision import Decision, Moves, Scope
from tests.passes import graphs
from tests.passes.captures import capture_step
from tests.passes.move.test_move_activations import Words, check_training
from tests.passes.split.test_split_operators import Gated


class Layers(nn.Module):
    """Layers of an MLP with a norm and a residual, and a head; x: [batch, 16]."""

    def __init__(self, layers: int = 2, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}
            )
            for _ in range(layers)
        )
        self.drop = drop
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            hidden = F.dropout(F.gelu(one["up"](one["norm"](x))), self.drop, self.training)
            x = x + one["down"](hidden)
        y: Tensor = self.head(x)
        return y


def test_every_layer_has_its_group() -> None:
    captured, ctx = capture_step(Layers(), torch.randn(8, 16), world_size=4)
    found = find_move_groups(captured, ctx)
    ((group, kept),) = found.by_weights
    assert group.dims == {
        f"layers.{layer}.{name}": dim
        for layer in range(2)
        for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1))
    }
    assert kept.dims == group.dims and group.has_chunks and kept.has_chunks
    assert group.weight_bytes == 4 * (64 * 16 + 64 + 64 * 16)
    # Gathered once in the forward and twice in the backward, summed once in each.
    assert group.token_bytes == 5 * (4 * 4 * 8 * 16) * 3 // 4
    assert group.decision == Decision.SHARD_REGATHER
    # Gathered tokens that are kept: once in the backward.
    assert kept.token_bytes == 4 * (4 * 4 * 8 * 16) * 3 // 4
    assert kept.decision == Decision.SHARD_KEEP
    assert set(found.refused) >= {"head.weight"}


def test_a_gated_mlp_is_one_group() -> None:
    captured, ctx = capture_step(Gated(), torch.randn(3, 5, 6), world_size=2)
    ((group, *_),) = find_move_groups(captured, ctx).by_weights
    assert group.dims == {"up.weight": 0, "gate.weight": 0, "down.weight": 1}


def test_reasons() -> None:
    captured, ctx = capture_step(Layers(drop=0.5), torch.randn(8, 16), world_size=2)
    found = find_move_groups(captured, ctx)
    assert all(group.alone for group in found.groups)
    assert "random numbers (dropout)" in found.refused["layers.1.up.weight"]
    captured, ctx = capture_step(Layers(), torch.randn(8, 16), world_size=23)
    found = find_move_groups(captured, ctx)
    assert "23 ranks are too many for the 64" in found.refused["layers.0.up.weight"]


def planned(batch: int, **changes):
    captured, ctx = capture_step(Layers(), torch.randn(batch, 16), world_size=2, **changes)
    return make_plan(captured, ctx, default_passes())


@pytest.mark.thorough
@pytest.mark.usefixtures("short_search")
def test_the_planner_moves_the_smaller_thing() -> None:
    few, many = (planned(batch, tensor_parallel=True) for batch in (2, 256))
    up = "layers.0.up.weight"
    assert few[up].moves is Moves.ACTIVATIONS and "activations: saves" in few[up].reason
    assert few[up].decision.scope is Scope.ALL
    assert many[up].moves is Moves.WEIGHT
    assert "the bytes of the weights" in many[up].reason
    without = planned(2)
    assert not without.moved and "activations" not in without[up].reason
    assert few.prediction.step_seconds < 0.8 * without.prediction.step_seconds
    assert few == planned(2, tensor_parallel=True)


def test_a_table_has_no_chunks() -> None:
    captured, ctx = capture_step(Words(), torch.randint(0, 12, (3, 5)), world_size=2)
    ((group, *_),) = find_move_groups(captured, ctx).by_weights
    assert group.dims == {"words.weight": 0} and not group.has_chunks


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
@pytest.mark.parametrize("latency, is_chunked", [(1e-6, True), (1e-2, False)])
def test_the_planner_takes_chunks_where_they_hide_tokens(latency: float, is_chunked: bool) -> None:
    """Compute and tokens take about as long; each further collective takes its latency."""
    fast = graphs.hardware(memory_bytes_per_second=1e11, flops_per_second={"default": 3e9})
    rate = dataclasses.replace(fast.collectives["all_gather"], latency_seconds=latency)
    hardware = dataclasses.replace(fast, collectives=dict.fromkeys(fast.collectives, rate))
    plan = planned(32, hardware=hardware, tensor_parallel=("layers.0.up.weight",))
    for name in plan.moved:
        assert (plan[name].chunks > 1) == is_chunked
        assert ("chunks: saves" in plan[name].reason) == is_chunked


@pytest.mark.thorough
@pytest.mark.usefixtures("short_search")
def test_named_groups_stay_whatever_the_search_finds() -> None:
    plan = planned(256, tensor_parallel=("layers.1.down.weight",))
    assert plan.moved == {
        f"layers.{layer}.{name}"
        for layer in range(2)
        for name in ("up.weight", "up.bias", "down.weight")
    }


class Columns(nn.Module):
    """Two linears whose weights are [in, out], as GPT-2's; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.up, self.down = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(16, 6))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.bias, torch.tanh(self.first(x)), self.up)
        y: Tensor = x + F.gelu(h) @ self.down
        return y


def test_weights_of_rows_of_inputs_are_a_group_too() -> None:
    model = Columns()
    captured, ctx = capture_step(model, torch.randn(5, 6), world_size=2)
    ((group, *_),) = find_move_groups(captured, ctx).by_weights
    assert group.dims == {"up": 1, "bias": 0, "down": 0}
    check_training(model, [torch.randn(5, 6) for _ in range(2)], group.dims)
