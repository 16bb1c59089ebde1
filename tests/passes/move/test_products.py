"""Weights alone compute what gathered ones do, whatever reads their products."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.candidates.move_groups import find_move_groups
from passes.capture.captured_step import lay_out
from passes.pipeline import default_passes
from passes.pricing.predict import predict
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.chosen import more, thorough
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step
from tests.passes.move.test_heads import WIDTH, Fused
from tests.passes.move.test_move_activations import collectives
from tests.passes.move.test_within_hosts import on_hosts

QKV = {"1.qkv.weight": 0}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def fused(way: str = "chunk") -> nn.Sequential:
    """Attention with one projection behind a linear, so that it needs its input's gradient."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Fused(way))


class Dropped(nn.Module):
    """Two linears with dropout in between; x: [batch, length, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.dropout(torch.relu(self.up(x)), 0.5, self.training))
        return y


class Turned(nn.Module):
    """A weight ``[in, out]``, as GPT-2's, read twice; x: [batch, length, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        once = torch.softmax(x.flatten(0, 1) @ self.weight, 0)
        return torch.softmax(once @ self.weight, 0)


def check(
    model: nn.Module, given: list[Tensor], dims: dict[str, int], chunks: int = 1, **changes: Any
) -> tuple[Any, Plan, Any]:
    """Compare outputs and gradients with eager PyTorch, also with tokens kept."""
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = capture_step(model, given[0], world_size=len(given), **changes)
    contexts = [ctx.replace(rank=rank) for rank in range(len(given))]
    for rest in (Decision.REPLICATE, Decision.SHARD_REGATHER):
        for keep_tokens in (True, False):
            plan = decided(ctx, rest)
            plan = plan.tensor_parallel(dims, keep_tokens=keep_tokens, chunks=chunks, alone=True)
            made.check(captured, contexts, plan)
    return captured, plan, ctx


def rows(world_size: int) -> list[Tensor]:
    return [torch.randn(2, 5, WIDTH) for _ in range(world_size)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("way", "world_size", "uses_p2p"),
    [
        ("chunk", 2, True),
        *thorough(("unbind", 4, False)),
        *more(("slice", 2, False), ("unbind", 4, True)),
    ],
)
def test_a_fused_projection_stays(way: str, world_size: int, uses_p2p: bool, dim: int) -> None:
    captured, plan, ctx = check(
        fused(way), rows(world_size), {"1.qkv.weight": dim}, uses_p2p=uses_p2p
    )
    forward, backward = collectives(captured, plan, ctx)
    assert forward == ["gather", "reduce"]
    assert sorted(backward) == ["gather", "gather", "reduce"]


@pytest.mark.parametrize(
    "model, dims",
    [
        (Turned(), {"weight": 0}),
        (Turned(), {"weight": 1}),
        (Dropped().eval(), {"up.weight": 0, "down.weight": 1}),
        (Dropped().eval(), {"up.weight": 1, "down.weight": 0}),
    ],
)
def test_other_weights_alone(model: nn.Module, dims: dict[str, int]) -> None:
    check(model, rows(2), dims)


@pytest.mark.parametrize(("ranks", "uses_p2p"), [(3, True), (5, False)])
def test_weights_alone_that_the_ranks_do_not_divide(ranks: int, uses_p2p: bool) -> None:
    """Of 32 features, three ranks have 11, 11 and 10; five have 7, 7, 7, 7 and 4."""
    dims = {"up.weight": 0, "down.weight": 1}
    check(Dropped().eval(), rows(ranks), dims, uses_p2p=uses_p2p)


def test_weights_alone_that_the_ranks_of_hosts_do_not_divide() -> None:
    """Within hosts they have parts of any size, and over all ranks of hosts equal ones."""
    model, given = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 31)), rows(4)
    captured, ctx = on_hosts(model, given[0])
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    plan = decided(ctx, Decision.REPLICATE).replace(ranks_of_a_host=2)
    kept = plan.tensor_parallel({"0.weight": 0, "1.weight": 0}, within_hosts=True, alone=True)
    made.check(captured, [ctx.replace(rank=rank) for rank in range(4)], kept)
    mixed = kept.tensor_parallel({"1.weight": 0}, alone=True)
    with pytest.raises(ValueError, match="4 ranks of hosts do not divide the 31 features"):
        lay_out(captured, mixed, ctx, default_passes())


def test_a_frozen_weight_alone_sends_nothing_for_its_gradient() -> None:
    model = fused()
    model.get_parameter("1.qkv.weight").requires_grad_(False)
    captured, plan, ctx = check(model, rows(2), QKV)
    assert collectives(captured, plan, ctx) == (["gather", "reduce"], ["gather", "reduce"])


@pytest.mark.parametrize(
    ("uses_p2p", "dim"), [(True, 0), (False, 1), *thorough((True, 1), (False, 0))]
)
def test_tokens_travel_in_chunks(uses_p2p: bool, dim: int) -> None:
    """Of 10 tokens, in 4 chunks; the weight's gradient is one product."""
    dims = {"1.qkv.weight": dim, "1.o.weight": 0}
    captured, plan, ctx = check(fused(), rows(2), dims, chunks=4, uses_p2p=uses_p2p)
    forward, backward = collectives(captured, plan, ctx)
    assert [forward.count(kind) for kind in ("gather", "reduce")] == [8, 8]
    of_gradients, saved = 4 + 4, 2
    assert [backward.count(kind) for kind in ("gather", "reduce")] == [of_gradients + saved, 8]


@pytest.mark.parametrize("uses_p2p", [False, True])
def test_within_hosts(uses_p2p: bool) -> None:
    model, given = fused(), rows(4)
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = on_hosts(model, given[0], uses_p2p=uses_p2p)
    plan = decided(ctx, Decision.REPLICATE).replace(ranks_of_a_host=2)
    plan = plan.tensor_parallel(QKV, within_hosts=True, alone=True)
    made.check(captured, [ctx.replace(rank=rank) for rank in range(4)], plan)


def test_weights_that_have_no_other_group_are_groups_alone() -> None:
    """If that sends fewer bytes than the weight: of 10 tokens, and not of 100."""
    captured, ctx = capture_step(fused(), torch.randn(1, 5, WIDTH), world_size=2)
    found = find_move_groups(captured, ctx)
    own = {name for group in found.groups if group.alone for name in group.dims}
    assert "1.qkv.weight" in own and own <= found.refused.keys()
    assert any(group.decision.keep for group in found.groups)
    captured, ctx = capture_step(fused(), torch.randn(2, 50, WIDTH), world_size=2)
    found = find_move_groups(captured, ctx)
    assert not found.groups and "fused weight" in found.refused["1.qkv.weight"]


def test_the_bytes_are_those_of_tokens_and_features() -> None:
    """T tokens a rank, N ranks, width d, F features, per T (N - 1): x and x again, and the gradient
    of x, d each; the result and its gradient, F/N each."""
    tokens, ranks = 5, 4
    captured, ctx = capture_step(fused(), torch.randn(1, tokens, WIDTH), world_size=ranks)
    groups = find_move_groups(captured, ctx).groups
    found = {one.decision.keep: one for one in groups if "1.qkv.weight" in one.dims}
    for keep, times in ((False, 3), (True, 2)):
        elements = times * WIDTH + 2 * 3 * WIDTH // ranks
        assert found[keep].alone and list(found[keep].dims) == ["1.qkv.weight"]
        assert found[keep].token_bytes == 4 * tokens * (ranks - 1) * elements


def test_a_plan_by_hand_names_what_cannot_be_alone() -> None:
    _, ctx = capture_step(fused(), torch.randn(1, 5, WIDTH), world_size=2)
    plan = decided(ctx, Decision.REPLICATE)
    with pytest.raises(ValueError, match="alone=True needs a matrix"):
        plan.tensor_parallel({"1.qkv.bias": 0}, alone=True)
    saved = Plan.from_dict(json.loads(plan.tensor_parallel(QKV, alone=True).to_json()))
    assert saved["1.qkv.weight"].alone and not saved["1.o.weight"].alone


def test_the_peak_has_the_features_of_all_tokens() -> None:
    """A step's predicted peak is lower by the weight's parts that the other ranks have."""
    captured, ctx = capture_step(fused(), torch.randn(1, 5, WIDTH), world_size=4)
    plan = decided(ctx, Decision.REPLICATE)
    whole, own = (
        predict(captured, one, ctx, default_passes()).prediction.peak_bytes
        for one in (plan, plan.tensor_parallel(QKV, alone=True))
    )
    assert own < whole
